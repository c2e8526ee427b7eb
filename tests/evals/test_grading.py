from __future__ import annotations

import pytest

from openzaya.evals.grading import extract_answer, grade


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"The answer is \boxed{542}.", "542"),
        (r"\boxed{1} and then \boxed{ 2 }", "2"),
        (r"<think>\boxed{1}</think> so \boxed{2}", "2"),
        (r"<think>\boxed{1}</think> so nothing", None),
        (r"<think>a</think>\boxed{1}<think>b</think>", None),
        (r"<think>still thinking \boxed{1}", None),
        (r"\boxed{\frac{1}{2}} done", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {7}", "7"),
        (r"\boxed{1} \boxed{}", None),
        (r"\boxed{1} \boxed{2", None),
        (r"\boxed{1} \boxed{\frac{1}{2}", None),
        (r"\boxed{1} \boxed 2", None),
        (r"\boxed{17} then \boxed{204}", "204"),
        ("no box", None),
        ("", None),
    ],
)
def test_extract_answer(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("boxed", "answer", "right"),
    [
        ("007", "7", True),
        ("+7", "7", True),
        ("1,234", "1234", True),
        ("1{,}234", "1234", True),
        ("12,34", "1234", False),
        ("-0", "0", True),
        ("-5", "5", False),
        ("12  30 45", "12 30 45", True),
        ("12 45 30", "12 30 45", False),
        ("542 apples", "542", False),
        ("5420", "542", False),
        ("9" * 5000, "9" * 5000, True),
    ],
)
def test_grade(boxed: str, answer: str, right: bool) -> None:
    assert grade(f"So \\boxed{{{boxed}}}.", answer) is right
    assert grade(f"It is {boxed}.", answer) is False
