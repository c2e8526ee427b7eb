r"""The chat format, and which of its tokens are learned.

A turn is `<|im_start|>role\ncontent<|im_end|>\n`. An assistant's content may open with its
reasoning, `<think>\n...\n</think>\n`, and may end in calls of functions, each

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

where VALUE is the text itself for strings and JSON for everything else. Functions are described in
the system's turn; what they return comes back in turns of the role `tool`.

`render` gives the text for people and for `transformers` (through `CHAT_TEMPLATE`, which says the
same in Jinja); `encode_turns` gives the ids and is what training and serving use, since only it can
tell a control token from a user who types its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NotRequired, TypedDict

from openzaya.data.tokenizer import END_THINK, IM_END, IM_START, THINK, Tokenizer
from openzaya.errors import UserError

ROLES = ("system", "user", "assistant", "tool")

_TOOLS_HEAD = "You can call these functions, one described a line in JSON:\n<tools>"
_TOOLS_TAIL = (
    "\n</tools>\nA call is written so, with one parameter block an argument; a string's value "
    "stands as it is, any other value in JSON:\n"
    "<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>"
)


def _quoted(text: str) -> str:
    """A Jinja string."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"


CHAT_TEMPLATE = (
    "{% if tools %}"
    "{{ '<|im_start|>system\\n' }}"
    "{% if messages and messages[0]['role'] == 'system' %}"
    "{{ messages[0]['content'] + '\\n\\n' }}"
    "{% endif %}"
    "{{ " + _quoted(_TOOLS_HEAD) + " }}"
    "{% for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}"
    "{{ " + _quoted(_TOOLS_TAIL) + " + '<|im_end|>\\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if not (tools and loop.first and message['role'] == 'system') %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' and message['reasoning_content'] %}"
    "{{ '<think>\\n' + message['reasoning_content'] + '\\n</think>\\n' }}"
    "{% endif %}"
    "{{ message['content'] or '' }}"
    "{% if message['role'] == 'assistant' and message['tool_calls'] %}"
    "{% for call in message['tool_calls'] %}"
    "{{ '\\n' if message['content'] or not loop.first else '' }}"
    "{{ '<tool_call>\\n<function=' + call['function']['name'] + '>\\n' }}"
    "{% for key, value in call['function']['arguments'] | items %}"
    "{{ '<parameter=' + key + '>\\n' }}"
    "{{ value if value is string else value | tojson }}"
    "{{ '\\n</parameter>\\n' }}"
    "{% endfor %}"
    "{{ '</function>\\n</tool_call>' }}"
    "{% endfor %}"
    "{% endif %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and enable_thinking %}{{ '<think>\\n' }}{% endif %}"
    "{% endif %}"
)


class Message(TypedDict):
    """One turn.

    `tool_calls` are `{"function": {"name": NAME, "arguments": {KEY: VALUE}}}`.
    """

    role: str
    content: str
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


def render(
    messages: Sequence[Message],
    add_generation_prompt: bool = False,
    thinking: bool = False,
    tools: Sequence[dict[str, Any]] = (),
) -> str:
    """The conversation as text.

    Args:
        messages: The turns.
        add_generation_prompt: Open an assistant's turn at the end, for the model to continue.
        thinking: Open its reasoning as well.
        tools: Functions that may be called, as JSON schemas.

    Raises:
        UserError: if a role is unknown.
    """
    parts = [
        f"{IM_START}{message['role']}\n{turn_text(message)}{IM_END}\n"
        for message in _with_tools(messages, tools)
    ]
    if add_generation_prompt:
        parts.append(f"{IM_START}assistant\n" + (f"{THINK}\n" if thinking else ""))
    return "".join(parts)


def turn_text(message: Message) -> str:
    """What stands between the head of a turn and its end: what an assistant has to say."""
    return "".join(text for text, _ in _body(message))


def encode_turns(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    add_generation_prompt: bool = False,
    thinking: bool = False,
    tools: Sequence[dict[str, Any]] = (),
) -> tuple[list[int], list[int]]:
    """Ids of the conversation, and whose they are.

    Control tokens come from the format alone; names of control tokens inside a content are
    spelled out as text, but for the assistant's own `<think>` and `</think>`.

    Returns:
        ids and roles, both [length]: 1 + the place in `ROLES` on exactly the content of a turn and
        the `<|im_end|>` that closes it, 0 on the rest.

    Raises:
        UserError: if a role is unknown, or the tokenizer lacks the markers of turns.
    """
    start, end = (_marker(tokenizer, name) for name in (IM_START, IM_END))
    newline = tokenizer.encode("\n")
    ids: list[int] = []
    roles: list[int] = []
    for message in _with_tools(messages, tools):
        header = [start, *tokenizer.encode(message["role"] + "\n")]
        content = _body_ids(_body(message), tokenizer)
        ids += [*header, *content, end, *newline]
        role = 1 + ROLES.index(message["role"])
        roles += [0] * len(header) + [role] * (len(content) + 1) + [0] * len(newline)
    if add_generation_prompt:
        prompt = [start, *tokenizer.encode("assistant\n")]
        if thinking:
            prompt += _body_ids([(f"{THINK}\n", True)], tokenizer)
        ids += prompt
        roles += [0] * len(prompt)
    return ids, roles


def encode_chat(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    add_generation_prompt: bool = False,
    thinking: bool = False,
    tools: Sequence[dict[str, Any]] = (),
) -> tuple[list[int], list[int]]:
    """As `encode_turns`, but with a mask that is 1 on what the assistant has to say."""
    ids, roles = encode_turns(messages, tokenizer, add_generation_prompt, thinking, tools)
    own = 1 + ROLES.index("assistant")
    return ids, [int(role == own) for role in roles]


def _with_tools(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Iterator[Message]:
    """The turns, the system's first one with the functions described."""
    rest = list(messages)
    for message in rest:
        if message["role"] not in ROLES:
            raise UserError(
                f"a message has the role {message['role']!r}; it must be one of {', '.join(ROLES)}"
            )
    if tools:
        lead = ""
        if rest and rest[0]["role"] == "system":
            lead = rest.pop(0)["content"] + "\n\n"
        lines = "".join("\n" + _json(tool) for tool in tools)
        yield {"role": "system", "content": lead + _TOOLS_HEAD + lines + _TOOLS_TAIL}
    yield from rest


def _body(message: Message) -> list[tuple[str, bool]]:
    """The text of a turn in pieces, and whether the marks of reasoning in a piece are control."""
    if message["role"] != "assistant":
        return [(message["content"], False)]
    parts = []
    if reasoning := message.get("reasoning_content"):
        parts += [(f"{THINK}\n", True), (reasoning, False), (f"\n{END_THINK}\n", True)]
    parts.append((message["content"], True))
    for number, call in enumerate(message.get("tool_calls", [])):
        lead = "\n" if message["content"] or number else ""
        parts.append((lead + _call_text(call["function"]), False))
    return parts


def _call_text(function: dict[str, Any]) -> str:
    arguments = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else _json(value)}\n</parameter>\n"
        for key, value in function["arguments"].items()
    )
    return f"<tool_call>\n<function={function['name']}>\n{arguments}</function>\n</tool_call>"


def _json(value: Any) -> str:
    """As `transformers` spells JSON in templates."""
    return json.dumps(value, ensure_ascii=False)


def _marker(tokenizer: Tokenizer, name: str) -> int:
    found = tokenizer.token_id(name)
    if found is None:
        raise UserError(
            f"the tokenizer has no {name} token, which the chat format needs: use a chat "
            'tokenizer, or train one, or give the source style = "plain"'
        )
    return found


def _body_ids(parts: Sequence[tuple[str, bool]], tokenizer: Tokenizer) -> list[int]:
    """Ids of the pieces' text, as of one text that only control tokens divide."""
    ids: list[int] = []
    held = ""
    for text, own in parts:
        for piece in re.split(f"({THINK}|{END_THINK})", text) if own else [text]:
            marker = tokenizer.token_id(piece) if own and piece in (THINK, END_THINK) else None
            if marker is None:
                held += piece
            else:
                ids += [*tokenizer.encode(held), marker]
                held = ""
    return ids + tokenizer.encode(held)
