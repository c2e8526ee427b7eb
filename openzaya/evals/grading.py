r"""Is a reply right? The final `\boxed{...}` decides, exactly; nothing else in the text counts."""

from __future__ import annotations

import re

_END_THINK = "</think>"
_BOX = re.compile(r"\\boxed\b\s*")
_INTEGER = re.compile(r"([+-]?)((?:[0-9]{1,3}(?:,[0-9]{3})+)|[0-9]+)")


def extract_answer(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}` behind the last `</think>`.

    Without any `</think>` the whole text is searched, unless it opens a `<think>`: unfinished
    reasoning has no answer. (If the prompt itself opened the reasoning, put that back in front.)

    Returns:
        The content, braces balanced; None if there is no box, or if the final one is empty or
        does not close. An earlier box never stands in for it.
    """
    _, closed, reply = text.rpartition(_END_THINK)
    if not closed and "<think>" in text:
        return None
    answer: str | None = None
    at = 0
    while (match := _BOX.search(reply, at)) is not None:
        answer, at = _braced(reply, match.end())
    return answer


def _braced(text: str, at: int) -> tuple[str | None, int]:
    """Content of the braces that open at `at`, and where the search goes on."""
    if not text.startswith("{", at):
        return None, at
    depth = 0
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, at):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)  # an escaped brace is no brace
        if depth == 0:
            return text[at + 1 : match.start()].strip() or None, match.end()
    return None, len(text)


def normalise(answer: str) -> str:
    """The form in which answers are compared.

    White space is collapsed; an integer loses its plus sign, leading zeros and the commas (or
    LaTeX `{,}`) between its thousands.
    """
    answer = " ".join(answer.split())
    match = _INTEGER.fullmatch(answer.replace("{,}", ","))
    if match is None:
        return answer
    digits = match.group(2).replace(",", "").lstrip("0") or "0"
    return f"-{digits}" if match.group(1) == "-" and digits != "0" else digits


def grade(text: str, answer: str) -> bool:
    """Whether a reply's final box holds the answer."""
    found = extract_answer(text)
    return found is not None and normalise(found) == normalise(answer)
