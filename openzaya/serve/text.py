"""Tokens to text while they come: whole characters, no stop string, reasoning apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from openzaya.data.tokenizer import END_THINK, THINK, Tokenizer

_REPLACEMENT = "\ufffd"

_CONTEXT = 8
"""Prompt tokens that the first decoded window starts with: some decoders drop a leading space."""

_LONGEST_WAIT = 16
"""Tokens to wait for the rest of a character; no character is longer, so the bytes are broken."""


class Detokenizer:
    """The text of a growing list of ids, piece by piece.

    Every step decodes a window of a few ids only. What ends in an incomplete character is held back
    until the character is whole. Control tokens have no text, but for `<think>` and `</think>`,
    which are spelled out whether the tokenizer calls them special or not.

    Args:
        prompt: the ids before the first one.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._markers = {
            found: name
            for name in (THINK, END_THINK)
            if (found := tokenizer.token_id(name)) is not None
        }
        self._window: list[int] = []
        self._read = 0  # ids of the window whose text was out when it began
        self._emitted = 0  # characters of the window's text that are out
        self._restart(list(prompt[-_CONTEXT:]))

    def push(self, token: int) -> str:
        """The text that becomes certain with one more token."""
        if token in self._markers:
            self._restart([])
            return self._markers[token]
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        stable = text.rstrip(_REPLACEMENT)
        waiting = len(self._window) - self._read
        if len(stable) == len(text) or waiting > _LONGEST_WAIT:
            piece = text[self._emitted :]
            # The last piece stays as the next one's context.
            self._restart(self._window[self._read :])
            return piece
        piece = stable[self._emitted :]
        self._emitted = max(self._emitted, len(stable))
        return piece

    def _restart(self, window: list[int]) -> None:
        """Begin a window with ids whose text is out already."""
        self._window = window
        self._read = len(window)
        self._emitted = len(self._tokenizer.decode(window))


def possible_start(text: str, needles: Sequence[str]) -> int:
    """Length of the longest end of `text` that one of `needles` may still begin with."""
    longest = max((len(needle) for needle in needles), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(needle.startswith(text[-length:]) for needle in needles):
            return length
    return 0


class StopStrings:
    """Lets text through up to the first stop string, wherever tokens divide it."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """What may be shown, and whether a stop string was met."""
        if not self._stop:
            return text, False
        text = self._held + text
        starts = [at for needle in self._stop if (at := text.find(needle)) >= 0]
        if starts:
            self._held = ""
            return text[: min(starts)], True
        cut = len(text) - possible_start(text, self._stop)
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """What was held back, when nothing more comes."""
        held, self._held = self._held, ""
        return held


@dataclass(frozen=True)
class Piece:
    """Some text of an answer, and whether it is still reasoning."""

    kind: Literal["reasoning", "answer"]
    text: str


class ThinkSplitter:
    """Divides text at `<think>` and `</think>`, wherever tokens divide those.

    Line breaks right after a marker belong to the marker.

    Args:
        thinking: the prompt has already opened the reasoning.
    """

    def __init__(self, thinking: bool = False) -> None:
        self._thinking = thinking
        self._held = ""
        self._at_start = True

    def push(self, text: str) -> list[Piece]:
        """The pieces that become certain with this text."""
        pieces: list[Piece] = []
        self._held += text
        while True:
            marker = END_THINK if self._thinking else THINK
            before, found, after = self._held.partition(marker)
            if not found:
                break
            self._add(pieces, before)
            self._thinking, self._at_start, self._held = not self._thinking, True, after
        cut = len(self._held) - possible_start(self._held, (marker,))
        self._add(pieces, self._held[:cut])
        self._held = self._held[cut:]
        return pieces

    def flush(self) -> list[Piece]:
        """What was held back, when nothing more comes."""
        pieces: list[Piece] = []
        self._add(pieces, self._held)
        self._held = ""
        return pieces

    def _add(self, pieces: list[Piece], text: str) -> None:
        if self._at_start:
            text = text.lstrip("\n")
        if text:
            self._at_start = False
            pieces.append(Piece("reasoning" if self._thinking else "answer", text))
