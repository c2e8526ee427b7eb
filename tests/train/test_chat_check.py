"""Field note 39: what is learned must be what the served parser reads."""

from __future__ import annotations

from typing import Any

import pytest

from openzaya.data.chat import Message
from openzaya.data.conversations import ChatEncoder, Conversation
from openzaya.data.template import ChatTemplate
from openzaya.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from openzaya.errors import UserError
from openzaya.train.chat_check import check_tool_calls

TOOLS: list[dict[str, Any]] = [
    {"function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}
]
HERMES = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{% for c in m.tool_calls %}{{ '<tool_call>\\n' + c.function | tojson + '\\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
XML = HERMES.replace(
    "c.function | tojson",
    "'<function=' + c.function.name + '>' + '<parameter=a>' + (c.function.arguments.a | string)"
    " + '</parameter></function>'",
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([], 300)


def talk(arguments: dict[str, Any], content: str = "", tools: Any = TOOLS) -> Conversation:
    call = {"function": {"name": "add", "arguments": arguments}}
    messages: list[Message] = [
        {"role": "user", "content": "<tool_call> is what I type"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
    ]
    return Conversation(messages, tools, "file.jsonl:3")


def in_template(tokenizer: Tokenizer, source: str) -> ChatEncoder:
    return ChatEncoder(tokenizer, ChatTemplate(tokenizer, source, SPECIAL_TOKENS))


def test_calls_that_come_back(tokenizer: Tokenizer) -> None:
    for arguments in ({"a": 1}, {"b": "x\n</tool_call>"}, {}):
        check_tool_calls(talk(arguments, "so:"), ChatEncoder(tokenizer))
    check_tool_calls(talk({"a": 1}), in_template(tokenizer, XML))
    zyphra = XML.replace("tool_call>", "zyphra_tool_call>")
    check_tool_calls(talk({"a": 1}), in_template(tokenizer, zyphra))
    written = (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    )
    check_tool_calls(talk({"a": 2}, written), ChatEncoder(tokenizer))


@pytest.mark.parametrize(
    ("conversation", "message"),
    [
        (talk({"a": 1}, tools=()), r'add\(\{"a": 1\}\) comes back as add\(\{"a": "1"\}\)'),
        (talk({"a": "1"}), r'comes back as add\(\{"a": 1\}\)'),
        (talk({"a": True}, tools=()), 'comes back as add.*"true"'),
        (talk({"b": "x\n</parameter>\n<parameter=c>\ny"}), "comes back as add.*c"),
        (talk({"a\nb": "x"}), "comes back as text, no call"),
        (talk({}, '<tool_call>\n{"name": "add"}\n</tool_call>'), "JSON inside the tags"),
        (talk({}, "<zyphra_tool_call>..."), "other tags than the template's"),
    ],
)
def test_calls_that_do_not_are_named(
    conversation: Conversation, message: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(UserError, match=f"file.jsonl:3: message 2: .*{message}"):
        check_tool_calls(conversation, ChatEncoder(tokenizer))


def test_a_template_that_writes_json_does_not_pass(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"comes back as text.*the chat template must write calls"):
        check_tool_calls(talk({"a": 1}), in_template(tokenizer, HERMES))
