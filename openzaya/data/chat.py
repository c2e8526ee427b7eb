r"""The chat format, and which of its tokens are learned.

A turn is `<|im_start|>role\ncontent<|im_end|>\n`. An assistant's content may open with its
reasoning, `<think>\n...\n</think>\n`. `render` gives the text for people and for `transformers`
(through `CHAT_TEMPLATE`, which says the same in Jinja); `encode_chat` gives the ids and is what
training and serving use, since only it can tell a control token from a user who types its name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypedDict

from openzaya.data.tokenizer import END_THINK, IM_END, IM_START, THINK, Tokenizer
from openzaya.errors import UserError

ROLES = ("system", "user", "assistant", "tool")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and enable_thinking %}{{ '<think>\\n' }}{% endif %}"
    "{% endif %}"
)


class Message(TypedDict):
    """One turn."""

    role: str
    content: str


def _check_role(message: Message) -> None:
    if message["role"] not in ROLES:
        raise UserError(
            f"a message has the role {message['role']!r}; it must be one of {', '.join(ROLES)}"
        )


def render(
    messages: Sequence[Message], add_generation_prompt: bool = False, thinking: bool = False
) -> str:
    """The conversation as text.

    Args:
        messages: The turns.
        add_generation_prompt: Open an assistant's turn at the end, for the model to continue.
        thinking: Open its reasoning as well.

    Raises:
        UserError: if a role is unknown.
    """
    parts = []
    for message in messages:
        _check_role(message)
        parts.append(f"{IM_START}{message['role']}\n{message['content']}{IM_END}\n")
    if add_generation_prompt:
        parts.append(f"{IM_START}assistant\n" + (f"{THINK}\n" if thinking else ""))
    return "".join(parts)


def encode_chat(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    add_generation_prompt: bool = False,
    thinking: bool = False,
) -> tuple[list[int], list[int]]:
    """Ids of the conversation, and a mask that is 1 on what the assistant has to say.

    The mask covers exactly the content of assistant turns and the `<|im_end|>` that closes them.
    Control tokens come from the format alone; names of control tokens inside a content are
    spelled out as text, but for the assistant's own `<think>` and `</think>`.

    Returns:
        ids and mask, both [length].

    Raises:
        UserError: if a role is unknown, or the tokenizer lacks the markers of turns.
    """
    start, end = (_marker(tokenizer, name) for name in (IM_START, IM_END))
    newline = tokenizer.encode("\n")
    ids: list[int] = []
    mask: list[int] = []
    for message in messages:
        _check_role(message)
        own = message["role"] == "assistant"
        header = [start, *tokenizer.encode(message["role"] + "\n")]
        content = _content_ids(message["content"], tokenizer, own)
        ids += [*header, *content, end, *newline]
        mask += [0] * len(header) + [int(own)] * (len(content) + 1) + [0] * len(newline)
    if add_generation_prompt:
        prompt = [start, *tokenizer.encode("assistant\n")]
        if thinking:
            prompt += _content_ids(f"{THINK}\n", tokenizer, own=True)
        ids += prompt
        mask += [0] * len(prompt)
    return ids, mask


def _marker(tokenizer: Tokenizer, name: str) -> int:
    found = tokenizer.token_id(name)
    if found is None:
        raise UserError(
            f"the tokenizer has no {name} token, which the chat format needs: use a chat "
            'tokenizer, or train one, or give the source style = "plain"'
        )
    return found


def _content_ids(content: str, tokenizer: Tokenizer, own: bool) -> list[int]:
    if not own:
        return tokenizer.encode(content)
    ids: list[int] = []
    for part in re.split(f"({THINK}|{END_THINK})", content):
        marker = tokenizer.token_id(part) if part in (THINK, END_THINK) else None
        ids += tokenizer.encode(part) if marker is None else [marker]
    return ids
