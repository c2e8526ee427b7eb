from __future__ import annotations

import numpy as np
import pytest

from openzaya.data.permutation import permutation, permute


@pytest.mark.parametrize("n", [*range(1, 70), 255, 256, 257, 1000, 4097])
def test_bijection(n: int) -> None:
    assert sorted(permutation(n, "key", 3).tolist()) == list(range(n))


def test_one_at_a_time_equals_all_at_once() -> None:
    for n in (1, 2, 5, 300):
        assert [permute(i, n, 1, "x") for i in range(n)] == permutation(n, 1, "x").tolist()


def test_depends_on_the_key() -> None:
    seen = {tuple(permutation(20, key).tolist()) for key in range(50)}
    assert len(seen) == 50


def test_every_place_is_reached_about_equally() -> None:
    first = np.bincount([permute(0, 8, key) for key in range(4000)], minlength=8)
    assert first.min() > 400
    assert first.max() < 600


def test_large_domain_and_bounds() -> None:
    assert 0 <= permute(10**15, 10**15 + 1, 0) <= 10**15
    with pytest.raises(IndexError, match="outside"):
        permute(5, 5, 0)
