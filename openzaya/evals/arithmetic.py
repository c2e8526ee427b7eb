"""Accuracy on held-out arithmetic, with an interval and the level of guessing beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from openzaya.data import tasks
from openzaya.data.tasks import Task
from openzaya.errors import UserError
from openzaya.evals.grading import grade

_Z = 1.959964  # 95 % of a normal distribution lie within this many standard deviations
_TRIES_PER_PROBLEM = 100


@dataclass(frozen=True)
class Accuracy:
    """Right answers of some problems.

    Attributes:
        correct: Problems answered right.
        total: All problems.
        low: Lower end of the 95 % interval of the accuracy.
        high: Upper end.
        chance: Accuracy of always giving the most common answer (of the problem's kind).
    """

    correct: int
    total: int
    low: float
    high: float
    chance: float

    @property
    def value(self) -> float:
        """Share of right answers."""
        return self.correct / self.total


@dataclass(frozen=True)
class Score:
    """Accuracy of each kind, in the order of the problems, and of all together."""

    kinds: dict[str, Accuracy]
    overall: Accuracy


def problems(kinds: Sequence[str], count: int, seed: int) -> list[Task]:
    """Held-out problems, no two the same, with equally many of each kind (to one).

    Args:
        kinds: Which; empty means all that can be checked.
        count: How many.
        seed: Names the choice.

    Raises:
        UserError: if a kind is unknown or cannot be checked, or has not enough problems.
    """
    kinds = tuple(dict.fromkeys(kinds)) or tasks.VERIFIABLE
    wrong = [kind for kind in kinds if kind not in tasks.VERIFIABLE]
    if wrong:
        raise UserError(
            f"no accuracy can be measured on {', '.join(wrong)}; there are "
            f"{', '.join(tasks.VERIFIABLE)}"
        )
    found: dict[str, list[Task]] = {}
    for place, kind in enumerate(kinds):
        wanted = count // len(kinds) + (place < count % len(kinds))
        distinct: dict[str, Task] = {}
        for index in range(wanted * _TRIES_PER_PROBLEM):
            if len(distinct) == wanted:
                break
            task = tasks.make(kind, seed, index, heldout=True)
            distinct.setdefault(task.problem, task)
        if len(distinct) < wanted:
            raise UserError(
                f"there are not {wanted} different held-out problems of kind {kind!r} (found "
                f"{len(distinct)}): ask for fewer"
            )
        found[kind] = list(distinct.values())
    longest = max(map(len, found.values()))
    return [found[kind][i] for i in range(longest) for kind in kinds if i < len(found[kind])]


def wilson(correct: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a share: it holds up near 0 and 1 and for few trials.

    Source: Wilson, "Probable inference, the law of succession, and statistical inference" (1927).
    """
    share = correct / total
    centre = share + _Z**2 / (2 * total)
    spread = _Z * sqrt(share * (1 - share) / total + _Z**2 / (4 * total**2))
    scale = 1 + _Z**2 / total
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def score(posed: Sequence[Task], replies: Sequence[str]) -> Score:
    """Grades one reply to each problem.

    Raises:
        ValueError: if there are no problems, or not one reply for each.
    """
    if not posed or len(posed) != len(replies):
        raise ValueError(f"{len(posed)} problems and {len(replies)} replies: need one for each")
    answers: dict[str, Counter[str]] = {}
    right: Counter[str] = Counter()
    for task, reply in zip(posed, replies, strict=True):
        answers.setdefault(task.kind, Counter())[task.answer] += 1
        right[task.kind] += grade(reply, task.answer)
    guessed = {kind: max(counts.values()) for kind, counts in answers.items()}
    totals = {kind: counts.total() for kind, counts in answers.items()}
    return Score(
        kinds={kind: _accuracy(right[kind], totals[kind], guessed[kind]) for kind in answers},
        overall=_accuracy(right.total(), len(posed), sum(guessed.values())),
    )


def _accuracy(correct: int, total: int, guessed: int) -> Accuracy:
    low, high = wilson(correct, total)
    return Accuracy(correct, total, low, high, guessed / total)
