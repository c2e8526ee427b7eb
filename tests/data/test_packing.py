from __future__ import annotations

import numpy as np

from openzaya.data.packing import IGNORE, best_fit, packed_row, stack, window_row


def test_window_row() -> None:
    # Documents: ...10 11 | 12 13 14 | 15
    row = window_row(np.array([10, 11, 12, 13, 14, 15]), np.array([2, 5]))
    assert row.tokens.tolist() == [10, 11, 12, 13, 14]
    assert row.targets.tolist() == [11, IGNORE, 13, 14, IGNORE]
    assert row.positions.tolist() == [0, 1, 0, 1, 2]
    assert row.real_tokens == 5


def test_window_that_starts_with_a_document() -> None:
    row = window_row(np.array([10, 11, 12]), np.array([0]))
    assert (row.targets.tolist(), row.positions.tolist()) == ([11, 12], [0, 1])


def test_packed_row() -> None:
    row = packed_row([([5, 6, 7], None), ([8, 9, 10], [0, 0, 1])], 9, pad_id=0)
    assert row.tokens.tolist() == [5, 6, 7, 8, 9, 10, 0, 0, 0]
    assert row.targets.tolist() == [6, 7, IGNORE, IGNORE, 10, IGNORE, IGNORE, IGNORE, IGNORE]
    assert row.positions.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2]
    assert row.real_tokens == 6


def test_packed_row_without_padding() -> None:
    row = packed_row([([5, 6], None)], 2, pad_id=0)
    assert (row.tokens.tolist(), row.real_tokens) == ([5, 6], 2)


def test_stack() -> None:
    batch = stack([packed_row([([5, 6], None)], 3, 0), packed_row([([7], None)], 3, 0)])
    assert batch.tokens.shape == batch.targets.shape == batch.positions.shape == (2, 3)
    assert batch.real_tokens == 3


def test_best_fit() -> None:
    bins = best_fit(np.array([6, 11, 5, 4, 10, 3]), 10)
    assert sorted(map(sorted, bins)) == [[0, 3], [2, 5], [4]]  # 6+4, 5+3, 10; 11 does not fit


def test_best_fit_loses_nothing_and_packs_tightly() -> None:
    lengths = np.random.default_rng(0).integers(1, 400, 2000)
    bins = best_fit(lengths, 512)
    assert sorted(i for members in bins for i in members) == list(range(2000))
    filled = [int(lengths[members].sum()) for members in bins]
    assert max(filled) <= 512
    assert sum(filled) / (512 * len(bins)) > 0.97
