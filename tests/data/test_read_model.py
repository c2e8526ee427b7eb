from __future__ import annotations

import pytest

from openzaya.data.read_model import PUBLISHED, PUBLISHED_IOPS, ReadModel


def test_the_published_figures() -> None:
    assert PUBLISHED.bytes == 64 << 20
    assert PUBLISHED.pages == 16_384
    for sigma in (1.0, 2.0, 8.0):
        assert PUBLISHED.iops(sigma) == pytest.approx(6_554 * sigma, rel=1e-4)
        assert PUBLISHED.break_seconds(sigma, PUBLISHED_IOPS) == pytest.approx(0.234 * sigma, 1e-3)


def test_sigma_grows_as_sequences_shrink() -> None:
    assert PUBLISHED.sigma(0) == 1
    assert PUBLISHED.sigma(1) == 1.25  # four pages a sequence, and one more
    assert ReadModel(1, 512, 2).sigma(1) == 5
