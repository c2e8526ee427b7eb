"""What a chat source teaches must be what serving understands: calls are parsed again."""

from __future__ import annotations

import json
from typing import Any

from openzaya.data.conversations import WRAPPERS, ChatEncoder, Conversation
from openzaya.errors import UserError
from openzaya.serve.text import ThinkSplitter
from openzaya.serve.tool_calls import parse_answer, wrapper_of


def check_tool_calls(conversation: Conversation, encoder: ChatEncoder) -> None:
    """Show every call as it will be learned, and read it with the parser that serving uses.

    Raises:
        UserError: naming the place, if something else comes back, or a call in the text is none.
    """
    wrapper = wrapper_of(None if encoder.template is None else encoder.template.source)
    for index, message in enumerate(conversation.messages):
        calls = message.get("tool_calls", [])
        wrapped = any(f"<{tag}>" in message["content"] for tag in WRAPPERS)
        if message["role"] != "assistant" or not (calls or wrapped):
            continue
        answer = _without_reasoning(encoder.said(conversation, index))
        text, parsed = parse_answer(answer, conversation.tools, wrapper)
        in_text = parse_answer(message["content"], conversation.tools, wrapper)[1]
        expected = [(call.name, call.arguments) for call in in_text]
        expected += [(c["function"]["name"], c["function"]["arguments"]) for c in calls]
        found = [(call.name, call.arguments) for call in parsed]
        for number, (name, arguments) in enumerate(expected):
            if number >= len(found) or _key(found[number]) != _key((name, arguments)):
                got = _short(found[number]) if number < len(found) else "text, no call"
                raise UserError(
                    f"{_place(conversation, index)}: the call {_short((name, arguments))} comes "
                    f"back as {got} when it is read as serving reads it. Numbers and tables need a "
                    "schema in `tools` that says so, and the chat template must write calls as "
                    f"<{wrapper}><function=NAME><parameter=KEY>VALUE</parameter></function>"
                    f"</{wrapper}>"
                )
        if len(found) > len(expected) or any(f"<{tag}>" in text for tag in WRAPPERS):
            raise UserError(
                f"{_place(conversation, index)}: its text has a call that is not written as "
                "serving reads it (JSON inside the tags, or other tags than the template's): give "
                "calls in `tool_calls`"
            )


def _place(conversation: Conversation, index: int) -> str:
    return f"{conversation.where}: message {index + 1}"


def _without_reasoning(said: str) -> str:
    splitter = ThinkSplitter()
    pieces = [*splitter.push(said), *splitter.flush()]
    return "".join(piece.text for piece in pieces if piece.kind == "answer")


def _key(call: tuple[str, Any]) -> str:
    return json.dumps(call, sort_keys=True)  # true is not 1, and 1 is not 1.0


def _short(call: tuple[str, Any]) -> str:
    text = f"{call[0]}({json.dumps(call[1], ensure_ascii=False)})"
    return text if len(text) <= 120 else text[:117] + "..."
