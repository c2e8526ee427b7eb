"""The oracle of parsing is rendering: what a template writes must come back, however it is cut."""

from __future__ import annotations

from typing import Any

import pytest

from openzaya.data.chat import CHAT_TEMPLATE, Message, turn_text
from openzaya.serve.text import ThinkSplitter
from openzaya.serve.tool_calls import ToolCall, ToolCallParser, parse_answer, wrapper_of

TYPES = ("string", "integer", "number", "boolean", "array", "object")
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "run",
        "parameters": {
            "type": "object",
            "properties": {
                **{name: {"type": name} for name in TYPES},
                "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "either": {"type": ["string", "integer"]},
            },
        },
    },
}
NASTY: list[dict[str, Any]] = [
    {},
    {"string": ""},
    {"string": "\n"},
    {"string": "\n\n  two lines\n\n"},
    {"string": "42"},
    {"string": "null"},
    {"string": '{"a": 1}'},
    {"string": "naïve 日本語 🦊 \\n \\u0041 \t"},
    {"string": "<parameter=x>\nno\n</parameter> and </tool_call>, </function>"},
    {"string": "</function>\n</tool_call>"},
    {"string": "</parameter>\n</function> is not the end"},
    {"string": "<tool_call>\n<function=f>\n</function>\n</tool_call>"},
    {"string": "<think>no</think><|im_end|>"},
    {"integer": -7, "number": 2.5, "boolean": False, "maybe": None},
    {"number": 3, "maybe": 4, "either": 5},
    {"either": "five"},
    {"array": [1, "2", [None, True]], "object": {"a": {"b": "</parameter>"}, "ü": "\n"}},
    {"unknown": "1"},
]


def call(arguments: dict[str, Any], name: str = "run") -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments}}


def typed(value: Any) -> Any:
    return [type(value), value]


@pytest.mark.parametrize("arguments", NASTY)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_come_back(arguments: dict[str, Any], size: int) -> None:
    other = {"string": "x", "integer": 1}
    message: Message = {
        "role": "assistant",
        "content": "First, <b>this</b>.",
        "tool_calls": [call(arguments), call(other)],
    }
    text = turn_text(message)
    parser = ToolCallParser([TOOL])
    pieces: list[str | ToolCall] = []
    for start in range(0, len(text), size):
        pieces += parser.push(text[start : start + size])
    pieces += parser.flush()
    said = "".join(piece for piece in pieces if isinstance(piece, str))
    calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
    assert said == "First, <b>this</b>."
    assert calls == [ToolCall("run", arguments), ToolCall("run", other)]
    assert [typed(v) for v in calls[0].arguments.values()] == [typed(v) for v in arguments.values()]


def test_a_call_comes_as_soon_as_it_is_complete() -> None:
    parser = ToolCallParser([TOOL])
    text = turn_text({"role": "assistant", "content": "", "tool_calls": [call({"integer": 1})]})
    assert parser.push(text[:-1]) == []
    assert parser.push(text[-1]) == [ToolCall("run", {"integer": 1})]
    assert parser.push("a < b") == ["a < b"]
    assert parser.push(" <tool_cal") == [" "]
    assert parser.push("ling>") == ["<tool_calling>"]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "run", "arguments": {"integer": 1}}\n</tool_call>',
        "<tool_call>\n<function=run>\n<parameter=integer>\n1\n</function>\n</tool_call>",
        "<tool_call>\n<function=run>\n</function>\n",
        "<tool_call>",
        "<tool_call>\n<function=a\nb>\n</function>\n</tool_call>",
        "<tool_call><function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>"
        "</tool_call>",
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    for size in (1, len(text)):
        parser = ToolCallParser([TOOL])
        cut = [text[i : i + size] for i in range(0, len(text), size)]
        pieces = [piece for part in cut for piece in parser.push(part)] + parser.flush()
        assert "".join(map(str, pieces)) == text


def test_json_in_the_wrapper_is_no_call_and_what_follows_still_is_one() -> None:
    """Field note 39."""
    good = turn_text({"role": "assistant", "content": "", "tool_calls": [call({"integer": 1})]})
    text, calls = parse_answer('<tool_call>\n{"name": "run"}\n</tool_call>\n' + good, [TOOL])
    assert text == '<tool_call>\n{"name": "run"}\n</tool_call>'
    assert calls == [ToolCall("run", {"integer": 1})]


def test_the_wrapper_is_that_of_the_template() -> None:
    assert wrapper_of(None) == wrapper_of(CHAT_TEMPLATE) == "tool_call"
    zyphra = wrapper_of("{{ '<zyphra_tool_call>' }}")
    assert zyphra == "zyphra_tool_call"
    text = "<zyphra_tool_call><function=f><parameter=x>1</parameter></function></zyphra_tool_call>"
    assert parse_answer(text, (), zyphra) == ("", [ToolCall("f", {"x": "1"})])
    assert parse_answer(text) == (text, [])


def test_reasoning_and_calls_do_not_eat_each_other() -> None:
    """Field note 44: the prompt opened the reasoning, and a call follows its end directly."""
    written = turn_text({"role": "assistant", "content": "", "tool_calls": [call({"integer": 1})]})
    splitter, parser = ThinkSplitter(thinking=True), ToolCallParser([TOOL])
    found: list[Any] = []
    for letter in f"maybe <tool_call> or not\n</think>\n{written}":
        for piece in splitter.push(letter):
            found += [piece] if piece.kind == "reasoning" else parser.push(piece.text)
    assert found[-1] == ToolCall("run", {"integer": 1})
    assert "".join(piece.text for piece in found[:-1]) == "maybe <tool_call> or not\n"
