r"""Generated arithmetic with worked steps and an answer that can be checked.

`make(kind, seed, index, heldout)` is a pure function. Whether a problem is held out is decided by a
hash of its content (kind and operands, in an order-free form where order does not matter), never by
its index: about a tenth of all problems is never trained on, in whatever words or seed they come.
The split is of whole problems; steps share small facts (7+6 occurs on both sides), as they must.

How large the spaces are, and how often guessing the most common answer of a kind is right (measured
over 20,000 held-out problems):

| kind | problems | answers | guessing | what the steps do |
|---|---|---|---|---|
| add | 5.0e7 (0 to 9,999) | 0 to 19,998 | 2 % | digit by digit from the right, with carry |
| sub | 5.0e7 | 0 to 9,999 | 2 % | digit by digit from the right, with borrow |
| chain | 2e5 (2 operations) to 2e10 (5) | 0 to 99 | 2 % | an operation a line, modulo 100 |
| compare | 1.7e8 (3 numbers) and more | 0 to 999 | 7 % | the best so far against the next |
| count | over 1e6 | 0 to 9 | 23 % | item against target, and the count |
| sort | 1.2e5 (3 numbers) to 6e8 (6) | as many | 0.1 % | takes the smallest of what is left |
| story | 7.7e4 | 0 to 211 | 2 % | one or two operations, a line each |

`talk` is small talk without a right answer: left out of every evaluation, trained on all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from openzaya.data import columns
from openzaya.data.chat import Message
from openzaya.data.rng import Rng, hash64
from openzaya.data.stories import story
from openzaya.data.talk import DIALOGUES
from openzaya.data.tokenizer import END_THINK, THINK
from openzaya.errors import UserError

HELDOUT_SHARE = 0.1
# A problem's canonical operands, the question in words, the steps' lines, and the answer.
Draft = tuple[str, str, list[str], str]


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        kind: One of `KINDS`.
        question: What is asked, in words.
        steps: The worked solution, one step a line; empty for `talk`.
        answer: What belongs into the box; the reply itself for `talk`.
        problem: Kind and operands in canonical form: equal problems have equal ones.
    """

    kind: str
    question: str
    steps: str
    answer: str
    problem: str


def _number(rng: Rng, fewest: int, most: int) -> int:
    """A number of `fewest` to `most` digits, every count of digits equally likely."""
    digits = rng.between(fewest, most)
    return rng.between(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1)


def _add(rng: Rng) -> Draft:
    a, b = _number(rng, 1, 4), _number(rng, 1, 4)
    words = ("What is {} + {}?", "Add {} and {}.", "{} + {} = ?", "How much is {} plus {}?")
    question = rng.choice(words).format(a, b)
    return f"{min(a, b)} {max(a, b)}", question, columns.add(a, b), str(a + b)


def _sub(rng: Rng) -> Draft:
    a, b = sorted((_number(rng, 1, 4), _number(rng, 1, 4)), reverse=True)
    words = (
        "What is {0} - {1}?",
        "Subtract {1} from {0}.",
        "{0} - {1} = ?",
        "How much is {0} minus {1}?",
    )
    question = rng.choice(words).format(a, b)
    return f"{a} {b}", question, columns.subtract(a, b), str(a - b)


def _chain(rng: Rng) -> Draft:
    start = value = rng.below(100)
    operations, said, lines = [], [], []
    for _ in range(rng.between(2, 5)):
        sign = rng.choice("+-*")
        operand = rng.between(2, 5) if sign == "*" else rng.between(1, 20)
        verb = {"+": "add", "-": "subtract", "*": "multiply by"}[sign]
        operations.append(f"{sign}{operand}")
        said.append(f"{verb} {operand}")
        if sign == "-" and operand > value:
            value += 100  # the same modulo 100, and no sign to carry along
        result, line = columns.line(value, sign, operand)
        value = result % 100
        lines.append(line if value == result else f"{line}>{value}")
    question = rng.choice(
        (
            f"Start with {start}, then {', '.join(said)}. Work modulo 100.",
            f"Modulo 100: take {start}, {', '.join(said)}. What do you get?",
            f"Begin at {start}: {', '.join(said)}. Give the result modulo 100.",
        )
    )
    return f"{start} {' '.join(operations)}", question, lines, str(value)


def _distinct(rng: Rng, count: int, draw: Callable[[], int]) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        if (value := draw()) not in found:
            found.append(value)
    return found


def _compare(rng: Rng) -> Draft:
    numbers = _distinct(rng, rng.between(3, 6), lambda: _number(rng, 1, 3))
    word, better = rng.choice((("largest", max), ("smallest", min)))
    best, lines = numbers[0], []
    for number in numbers[1:]:
        lines.append(f"{best},{number}:{better(best, number)}")
        best = better(best, number)
    listed = " ".join(map(str, numbers))
    question = rng.choice(
        (
            f"Which number is the {word}: {listed}?",
            f"Find the {word} of {listed}.",
            f"What is the {word} number in {listed}?",
        )
    )
    return " ".join(map(str, sorted(numbers))), question, lines, str(best)


def _count(rng: Rng) -> Draft:
    symbols = "0123456789" if rng.below(3) == 0 else "abcdefghijklmnopqrstuvwxyz"
    pool = [rng.choice(symbols) for _ in range(rng.between(2, 4))]
    items = [rng.choice(pool) for _ in range(rng.between(4, 9))]
    target = rng.choice(pool)
    seen, counted = 0, []
    for item in items:
        seen += item == target
        counted.append(f"{item} {target}:{seen}")  # what is compared stands side by side
    listed = " ".join(items)
    question = rng.choice(
        (
            f"How often does {target} occur in {listed}?",
            f"Count the {target} in {listed}.",
            f"How many times is {target} in the list {listed}?",
        )
    )
    return f"{target} {''.join(sorted(items))}", question, counted, str(seen)


def _sort(rng: Rng) -> Draft:
    numbers = _distinct(rng, rng.between(3, 6), lambda: rng.between(10, 99))
    left, lines = list(numbers), []
    while len(left) > 1:
        lines.append(f"{' '.join(map(str, left))}:{min(left)}")
        left.remove(min(left))
    listed, answer = " ".join(map(str, numbers)), " ".join(map(str, sorted(numbers)))
    question = rng.choice(
        (
            f"Sort {listed} in ascending order.",
            f"Put in order, smallest first: {listed}.",
            f"Arrange these numbers from small to large: {listed}.",
        )
    )
    return answer, question, [*lines, f"{left[0]}:{left[0]}"], answer


def _talk(rng: Rng) -> Draft:
    prompts, replies = rng.choice(DIALOGUES)
    prompt = rng.choice(prompts)
    return prompt, prompt, [], rng.choice(replies)


_MAKERS: dict[str, Callable[[Rng], Draft]] = {
    "add": _add,
    "sub": _sub,
    "chain": _chain,
    "compare": _compare,
    "count": _count,
    "sort": _sort,
    "story": story,
    "talk": _talk,
}
KINDS = tuple(_MAKERS)
VERIFIABLE = tuple(kind for kind in KINDS if kind != "talk")


def problem_is_heldout(problem: str) -> bool:
    """Whether a canonical problem belongs to the tenth that is never trained on."""
    return hash64("task", problem) < HELDOUT_SHARE * 2.0**64


def make(kind: str, seed: int, index: int, heldout: bool = False) -> Task:
    """Task number `index` of a kind, a pure function of the arguments.

    Args:
        kind: One of `KINDS`.
        seed: Names the sequence.
        index: Place in the sequence, from 0.
        heldout: Take a problem from the held-out tenth instead of the rest.

    Raises:
        ValueError: if held-out `talk` is asked for, which has no answers to check.
    """
    if heldout and kind == "talk":
        raise ValueError("talk has no held-out side")
    maker = _MAKERS[kind]
    rng = Rng("task", kind, seed, index, int(heldout))
    while True:
        operands, question, steps, answer = maker(rng)
        problem = f"{kind} {operands}"
        if kind == "talk" or problem_is_heldout(problem) == heldout:
            return Task(kind, question, "\n".join(steps), answer, problem)


def select(kinds: Sequence[str], name: str) -> tuple[str, ...]:
    """The kinds a source asks for, all if it names none.

    Raises:
        UserError: if there is no such kind; `name` is the source's, for the message.
    """
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown:
        raise UserError(
            f"source {name!r}: no such tasks: {', '.join(unknown)}; there are {', '.join(KINDS)}"
        )
    return tuple(dict.fromkeys(kinds)) or KINDS


def choose_kind(kinds: Sequence[str], *keys: int | str) -> str:
    """A kind for the place that `keys` name; `talk` comes a quarter as often as any other."""
    weighted = [kind for kind in kinds for _ in range(1 if kind == "talk" else 4)]
    return Rng("kind", *keys).choice(weighted)


def as_chat(task: Task) -> list[Message]:
    r"""Question and reply: `<think>\nsteps\n</think>\n` and a sentence with the boxed answer."""
    if task.kind == "talk":
        reply = f"{THINK}\n{END_THINK}\n{task.answer}"
    else:
        reply = f"{THINK}\n{task.steps}\n{END_THINK}\n{_sentence(task)}"
    return [{"role": "user", "content": task.question}, {"role": "assistant", "content": reply}]


def as_plain(task: Task) -> str:
    """Question, steps and answer as bare lines."""
    if task.kind == "talk":
        return f"{task.question}\n{task.answer}"
    return f"{task.question}\n{task.steps}\n{_sentence(task)}"


def _sentence(task: Task) -> str:
    return f"The answer is \\boxed{{{task.answer}}}."
