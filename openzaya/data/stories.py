"""Simple word problems: templates with names, things and two or three numbers."""

from __future__ import annotations

from dataclasses import dataclass

from openzaya.data import columns
from openzaya.data.rng import Rng

NAMES = ("Ana", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gita", "Hugo", "Ida", "Juan", "Kim", "Leo")
THINGS = ("apples", "books", "coins", "marbles", "nuts", "pens", "shells", "stamps", "stones")


@dataclass(frozen=True)
class Template:
    """A kind of story.

    Attributes:
        wordings: Texts with {a} and {b} for names, {t} for a thing, {x}, {y}, {z} for numbers.
        ranges: Lowest and highest value of x, y and z.
        operations: What is done to x in turn: a sign, and the number it is done with.
    """

    wordings: tuple[str, ...]
    ranges: tuple[tuple[int, int], ...]
    operations: tuple[tuple[str, str], ...]


TEMPLATES = (
    Template(
        (
            "{a} has {x} {t} and gets {y} more. How many {t} does {a} have now?",
            "{a} finds {x} {t}. {b} finds {y} {t}. How many {t} is that together?",
        ),
        ((2, 99), (2, 99)),
        (("+", "y"),),
    ),
    Template(
        (
            "{a} has {x} {t} and gives {y} to {b}. How many {t} are left?",
            "There are {x} {t}. {a} takes {y}. How many {t} remain?",
        ),
        ((20, 99), (2, 19)),
        (("-", "y"),),
    ),
    Template(
        (
            "{a} has {x} boxes of {y} {t} and {z} more {t}. How many {t} in all?",
            "{a} buys {x} bags with {y} {t} each. {b} brings {z} {t}. How many {t} is that?",
        ),
        ((2, 19), (2, 9), (1, 40)),
        (("*", "y"), ("+", "z")),
    ),
    Template(
        (
            "{a} has {x} boxes of {y} {t} and loses {z}. How many {t} are left?",
            "{a} packs {x} bags with {y} {t} each and gives {b} {z} {t}. How many remain?",
        ),
        ((5, 19), (4, 9), (1, 19)),
        (("*", "y"), ("-", "z")),
    ),
    Template(
        (
            "{a} has {x} {t}. {b} has {y} more than {a}. How many {t} do they have together?",
            "{b} has {y} more {t} than {a}, who has {x}. How many {t} in all?",
        ),
        ((2, 50), (2, 50)),
        (("+", "y"), ("+", "x")),
    ),
    Template(
        (
            "{a} has {x} {t}, gets {y} more and gives {z} to {b}. How many {t} does {a} have?",
            "There are {x} {t}. {a} adds {y} and {b} takes {z}. How many {t} are there now?",
        ),
        ((20, 60), (2, 40), (1, 20)),
        (("+", "y"), ("-", "z")),
    ),
    Template(
        (
            "{a} has {x} {t}, loses {y} and gives {z} to {b}. How many {t} are left?",
            "Of {x} {t} {a} takes {y} and {b} takes {z}. How many {t} remain?",
        ),
        ((40, 99), (1, 20), (1, 20)),
        (("-", "y"), ("-", "z")),
    ),
)


def story(rng: Rng) -> tuple[str, str, list[str], str]:
    """Operands, question, steps and answer of a story.

    The operands are the template's number and its numbers: names and things do not make a problem
    a different one.
    """
    place = rng.below(len(TEMPLATES))
    template = TEMPLATES[place]
    drawn = [rng.between(low, high) for low, high in template.ranges]
    numbers = dict(zip("xyz", drawn, strict=False))
    names = list(NAMES)
    rng.shuffle(names)
    question = rng.choice(template.wordings).format(
        a=names[0], b=names[1], t=rng.choice(THINGS), **numbers
    )
    value, lines = numbers["x"], []
    for sign, which in template.operations:
        operand = numbers[which]
        value, line = columns.line(value, sign, operand)
        lines.append(line)
    return f"{place} {' '.join(map(str, drawn))}", question, lines, str(value)
