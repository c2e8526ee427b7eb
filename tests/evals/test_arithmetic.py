from __future__ import annotations

from collections import Counter

import pytest

from openzaya.data.tasks import VERIFIABLE, as_chat, problem_is_heldout
from openzaya.errors import UserError
from openzaya.evals.arithmetic import problems, score, wilson


def test_problems_are_balanced_distinct_and_held_out() -> None:
    posed = problems((), 50, seed=0)
    counts = Counter(task.kind for task in posed)
    assert set(counts) == set(VERIFIABLE)
    assert set(counts.values()) == {7, 8}
    assert len({task.problem for task in posed}) == len(posed) == 50
    assert all(problem_is_heldout(task.problem) for task in posed)
    assert posed == problems((), 50, seed=0) != problems((), 50, seed=1)


def test_what_cannot_be_asked() -> None:
    with pytest.raises(UserError, match="talk; there are add"):
        problems(("add", "talk"), 4, 0)


def test_score() -> None:
    posed = problems(("add", "count"), 40, seed=3)
    worked = [as_chat(task)[1]["content"] for task in posed]
    perfect = score(posed, worked)
    assert perfect.overall.value == 1
    assert perfect.overall.high == 1
    assert perfect.overall.low == pytest.approx(0.912, abs=1e-3)
    half = [reply if task.kind == "add" else "?" for task, reply in zip(posed, worked, strict=True)]
    result = score(posed, half)
    assert (result.kinds["add"].correct, result.kinds["count"].correct) == (20, 0)
    assert (result.overall.correct, result.overall.total) == (20, 40)
    counted = Counter(task.answer for task in posed if task.kind == "count")
    assert result.kinds["count"].chance == max(counted.values()) / 20
    chances = [accuracy.chance for accuracy in result.kinds.values()]
    assert result.overall.chance == pytest.approx(sum(chances) / 2)
    with pytest.raises(ValueError, match="one for each"):
        score(posed, worked[1:])


def test_wilson() -> None:
    # Newcombe (1998), table I: 81 of 263 and 0 of 20.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
