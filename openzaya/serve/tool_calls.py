r"""Calls of functions in what a model says, as they come.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

One line break after `<parameter=KEY>` and one before `</parameter>` belong to the format. Whether
VALUE is text or JSON is for the function's schema to say; without one it is text. Values may hold
anything, the format's own tags included, as long as they do not end in all the closing tags: a
value goes up to the first `</parameter>` that another parameter or the function's end follows.
ZAYA1's published template puts `zyphra_tool_call` around a call; what counts is the template of the
checkpoint. JSON inside the wrapper is not the format, and stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from openzaya.data.conversations import WRAPPERS
from openzaya.serve.text import possible_start

_FUNCTION = "<function="
_HEAD = re.compile(r"\s*<function=([^<>\n]+)>\s*")
_PARAMETER = re.compile(
    r"<parameter=([^<>\n]+)>(.*?)</parameter>\s*(?=<parameter=[^<>\n]+>|</function>\s*\Z)",
    re.DOTALL,
)
_TAIL = re.compile(r"</function>\s*")
_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


@dataclass(frozen=True)
class ToolCall:
    """One call: the function's name, and its arguments by name."""

    name: str
    arguments: dict[str, Any]


def wrapper_of(template: str | None) -> str:
    """The tag around calls in a chat template's source; None is our own format."""
    known = (tag for tag in reversed(WRAPPERS) if template and f"<{tag}>" in template)
    return next(known, WRAPPERS[0])


class ToolCallParser:
    """Divides an answer (without its reasoning) into text and calls, wherever tokens divide it.

    A call comes out when it is complete; what turns out to be none comes out as text.

    Args:
        tools: schemas of the functions that may be called.
        wrapper: the tag around a call.
    """

    def __init__(self, tools: Sequence[dict[str, Any]] = (), wrapper: str = WRAPPERS[0]) -> None:
        self._schemas = {}
        for tool in tools:
            function = tool.get("function", tool)
            parameters = function.get("parameters") or {}
            self._schemas[function.get("name")] = parameters.get("properties") or {}
        self._open, self._close = f"<{wrapper}>", f"</{wrapper}>"
        self._held = ""
        self._calling = False  # what is held follows an opening tag

    def push(self, text: str) -> list[str | ToolCall]:
        """The pieces that become certain with this text."""
        pieces: list[str | ToolCall] = []
        self._held += text
        while self._advance(pieces):
            pass
        return pieces

    def flush(self) -> list[str | ToolCall]:
        """What was held back, when nothing more comes."""
        held = (self._open if self._calling else "") + self._held
        self._held, self._calling = "", False
        return [held] if held else []

    def _advance(self, pieces: list[str | ToolCall]) -> bool:
        """Take the next piece off; False if that needs more text."""
        if not self._calling:
            before, found, after = self._held.partition(self._open)
            if found:
                # The line break before a call is the format's.
                _add(pieces, before.removesuffix("\n"))
                self._calling, self._held = True, after
                return True
            cut = len(before) - possible_start(before, (f"\n{self._open}", self._open))
            _add(pieces, before[:cut])
            self._held = before[cut:]
            return False
        start = self._held.lstrip()[: len(_FUNCTION)]
        if not _FUNCTION.startswith(start):
            _add(pieces, self._open)
            self._calling = False
            return True
        at = self._held.find(self._close)
        while at >= 0:
            call = self._parse(self._held[:at])
            if call is not None:
                pieces.append(call)
                self._calling, self._held = False, self._held[at + len(self._close) :]
                return True
            at = self._held.find(self._close, at + 1)  # that one stands inside a value
        return False

    def _parse(self, body: str) -> ToolCall | None:
        head = _HEAD.match(body)
        if head is None:
            return None
        arguments: dict[str, Any] = {}
        schemas = self._schemas.get(head[1], {})
        at = head.end()
        while (match := _PARAMETER.match(body, at)) is not None:
            if match[1] in arguments:
                return None
            value = match[2].removeprefix("\n").removesuffix("\n")
            arguments[match[1]] = _typed(value, schemas.get(match[1]))
            at = match.end()
        return ToolCall(head[1], arguments) if _TAIL.fullmatch(body, at) else None


def parse_answer(
    text: str, tools: Sequence[dict[str, Any]] = (), wrapper: str = WRAPPERS[0]
) -> tuple[str, list[ToolCall]]:
    """The text and the calls of a whole answer."""
    parser = ToolCallParser(tools, wrapper)
    pieces = [*parser.push(text), *parser.flush()]
    said = "".join(piece for piece in pieces if isinstance(piece, str))
    return said, [piece for piece in pieces if isinstance(piece, ToolCall)]


def _add(pieces: list[str | ToolCall], text: str) -> None:
    if text:
        pieces.append(text)


def _typed(text: str, schema: Any) -> Any:
    """A value as its schema wants it; what does not fit stays text, for whoever is called."""
    kinds = _kinds(schema)
    if not kinds - {"string"}:
        return text
    with suppress(ValueError):
        value = json.loads(text)
        wanted = tuple(kind for name in kinds for kind in _TYPES.get(name, ()))
        fits = bool in wanted if isinstance(value, bool) else isinstance(value, wanted)
        if fits or "string" not in kinds:
            return value
    return text


def _kinds(schema: Any) -> set[str]:
    """The types that a schema allows; none if it does not say."""
    if not isinstance(schema, dict):
        return set()
    kinds = schema.get("type", [])
    found = {kinds} if isinstance(kinds, str) else set(kinds)
    for name in ("anyOf", "oneOf"):
        for other in schema.get(name, []):
            found |= _kinds(other)
    return found
