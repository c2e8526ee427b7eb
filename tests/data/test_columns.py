from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from openzaya.data import columns


@pytest.mark.parametrize(
    ("work", "exact", "second"),
    [
        (columns.add, lambda a, b: a + b, 9999),
        (columns.subtract, lambda a, b: a - b, 9999),
        (columns.multiply, lambda a, b: a * b, 9),
    ],
)
def test_columns_are_right_step_by_step(
    work: Callable[[int, int], list[str]], exact: Callable[[int, int], int], second: int
) -> None:
    rng = random.Random(0)
    for _ in range(500):
        a, b = rng.randrange(10 ** rng.randint(1, 4)), rng.randrange(second + 1)
        if work is columns.subtract:
            a, b = max(a, b), min(a, b)
        steps = work(a, b)
        for step in steps:
            calculation, result = step.split(":")[0].split("=")
            assert eval(calculation) == int(result)  # the text is ours: digits and signs
        assert int(steps[-1].split(":")[1]) == exact(a, b)


def test_a_known_column() -> None:
    assert columns.add(47, 85) == ["7+5+0=12:2", "4+8+1=13:132"]
    assert columns.subtract(105, 9) == ["15-9-0=6:6", "10-0-1=9:96", "1-0-1=0:096"]
    assert columns.multiply(19, 9) == ["9*9+0=81:1", "1*9+8=17:171"]
    assert columns.line(19, "*", 9) == (171, "19*9: 9*9+0=81:1 1*9+8=17:171 =171")
