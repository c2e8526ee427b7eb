"""Conversations as rows of data hold them, and how they become tokens to learn from.

A row has `messages` (role, content, and where there are any reasoning_content or reasoning,
tool_calls, tool_call_id, name) and may have `tools`, the schemas of functions that may be called.
`ChatEncoder` shows a conversation in the form that belongs to the model, our own (`chat.py`) or the
template of a checkpoint (`template.py`), and says of every token whose it is.

In a template, what an assistant says is found in its `{% generation %}` blocks, where it has them.
Else it is what a turn adds to the prompt that opens it: the difference of two renderings. That is
right only if the template shows a turn in the midst of a conversation as it did at its end, and
many drop the reasoning of earlier turns. Such a conversation is cut into several documents, one for
each message of the user with all that came before it, and in each only the answers to that message
are learned: just what the model will see, and say, when it is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from openzaya.data.chat import ROLES, Message, encode_turns, turn_text
from openzaya.data.template import ChatTemplate
from openzaya.data.tokenizer import END_THINK, THINK, Tokenizer
from openzaya.errors import UserError

WRAPPERS = ("tool_call", "zyphra_tool_call")
"""Tags around a call, of our format and of ZAYA1's published templates."""

_OWN = (THINK, END_THINK, *(f"<{slash}{tag}>" for tag in WRAPPERS for slash in ("", "/")))
"""Control tokens that an assistant's text may hold as such."""


@dataclass(frozen=True)
class Conversation:
    """Turns, the functions that may be called, and the place they were read from."""

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] = ()
    where: object = "a conversation"  # whose str() may take a while

    @property
    def text(self) -> str:
        """Everything that is said, for training a tokenizer and for telling rows apart."""
        return "\n".join(turn_text(message) for message in self.messages)


class Encoded(NamedTuple):
    """A document: ids, and roles (1 + place in `ROLES`, 0 for nobody's), both [length]."""

    ids: list[int]
    roles: list[int]


def parse_conversation(row: dict[str, Any], where: object, sparse: bool = False) -> Conversation:
    """A row in normal form.

    Contents in parts are joined, both names of reasoning are taken, arguments of calls may be JSON
    text or a table; messages and tools may be JSON text as a whole.

    Args:
        where: what says file and line, for messages.
        sparse: absent arguments are stored as null, as parquet does.

    Raises:
        UserError: naming place and field, if something is not of that form.
    """
    try:
        messages = _list(row.get("messages"), "messages")
        if not messages:
            raise UserError("`messages` is missing or empty: give it the turns of a chat")
        parsed = [_message(m, f"message {i + 1}", sparse) for i, m in enumerate(messages)]
        tools = _list(row.get("tools"), "tools")
        if not all(isinstance(tool, dict) for tool in tools):
            raise UserError("every entry of `tools` must be the JSON schema of a function")
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    return Conversation(parsed, [_dense(tool) if sparse else tool for tool in tools], where)


def _list(value: Any, what: str) -> list[Any]:
    if isinstance(value, str):
        value = _loads(value, what)
    if value is None:
        return []
    if not isinstance(value, list):
        raise UserError(f"{what} holds {type(value).__name__}, not a list")
    return value


def _loads(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{what} is text that is no JSON ({error})") from error


def _dense(value: Any) -> Any:
    """Without the nulls that stand for what is not there."""
    if isinstance(value, dict):
        return {key: _dense(item) for key, item in value.items() if item is not None}
    return [_dense(item) for item in value] if isinstance(value, list) else value


def _message(raw: Any, where: str, sparse: bool) -> Message:
    if not isinstance(raw, dict) or not isinstance(raw.get("role"), str):
        raise UserError(f"{where}: every message must be an object with a `role`")
    message: Message = {"role": raw["role"], "content": _content(raw.get("content"), where)}
    for name in ("reasoning_content", "reasoning"):
        if raw.get(name) is not None:
            if not isinstance(raw[name], str):
                raise UserError(f"{where}: {name} must be text")
            if raw[name]:
                message["reasoning_content"] = raw[name]
            break
    calls = _list(raw.get("tool_calls"), f"{where}: tool_calls")
    if calls:
        message["tool_calls"] = [_call(call, where, sparse) for call in calls]
    if isinstance(raw.get("tool_call_id"), str):
        message["tool_call_id"] = raw["tool_call_id"]
    if isinstance(raw.get("name"), str):
        message["name"] = raw["name"]
    return message


def _content(value: Any, where: str) -> str:
    if isinstance(value, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in value]
        if not all(isinstance(text, str) for text in texts):
            raise UserError(f"{where}: content has parts that are no text; only text is learned")
        return "".join(cast(list[str], texts))
    if not isinstance(value, str | None):
        raise UserError(f"{where}: content holds {type(value).__name__}, not text")
    return value or ""


def _call(raw: Any, where: str, sparse: bool) -> dict[str, Any]:
    function = raw.get("function", raw) if isinstance(raw, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(f"{where}: every tool call must name its `function`")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _loads(arguments or "{}", f"{where}: arguments of {function['name']}")
    if not isinstance(arguments, dict | None):
        raise UserError(f"{where}: the arguments of {function['name']} must be a table")
    arguments = _dense(arguments) if sparse else arguments
    call: dict[str, Any] = {"name": function["name"], "arguments": arguments or {}}
    return {"type": "function", "function": call} | ({"id": raw["id"]} if raw.get("id") else {})


@dataclass(frozen=True)
class ChatEncoder:
    """The form in which a model is talked to.

    Attributes:
        tokenizer: the model's.
        template: the model's; None is our own format.
        check: called with every conversation before it is encoded; raises what is wrong with it.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None = None
    check: Callable[[Conversation, ChatEncoder], None] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.template is not None:
            once = self.tokenizer.encode("x")
            if self.tokenizer.decode([*once, *once]) != "xx":
                raise UserError(
                    "the tokenizer puts a space in front of every text, so that a conversation "
                    "cannot be encoded turn by turn; use one that does not"
                )

    @property
    def digest(self) -> str:
        """Changes with everything that the ids depend on."""
        parts = [self.tokenizer.digest]
        if self.template is not None:
            settings = [self.template.tokens, list(self.template.control)]
            parts += [self.template.source, json.dumps(settings, sort_keys=True)]
        return "\0".join(parts)

    def encode(self, conversation: Conversation, loss_on: Sequence[str]) -> list[Encoded]:
        """The documents that a conversation becomes: one, but see above.

        Args:
            loss_on: roles whose tokens must be told from the rest.

        Raises:
            UserError: naming the place, if the form cannot show the conversation, does not show
                all that is to be learned, or does not let turns be told apart.
        """
        try:
            if self.template is None:
                ids, roles = encode_turns(
                    conversation.messages, self.tokenizer, tools=conversation.tools
                )
                wanted = {1 + ROLES.index(role) for role in loss_on}
                return [Encoded(ids, [role if role in wanted else 0 for role in roles])]
            return _Shown(self.template, conversation).documents(loss_on)
        except UserError as error:
            raise UserError(f"{conversation.where}: {error}") from error

    def said(self, conversation: Conversation, index: int) -> str:
        """What the assistant says in message number `index`, as the form spells it.

        Raises:
            UserError: as `encode`.
        """
        try:
            if self.template is None:
                return turn_text(conversation.messages[index])
            return self.template.show(_Shown(self.template, conversation).said(index))
        except UserError as error:
            raise UserError(f"{conversation.where}: {error}") from error


class _Shown:
    """One conversation in a template."""

    def __init__(self, template: ChatTemplate, conversation: Conversation) -> None:
        self._template = template
        self._turns = conversation.messages
        self._messages = [_hidden(message, template) for message in conversation.messages]
        self._tools = template.hide(list(conversation.tools))

    def documents(self, loss_on: Sequence[str]) -> list[Encoded]:
        wanted = [i for i, turn in enumerate(self._turns) if turn["role"] in loss_on]
        marked, spans = self._template.generated(self._render(len(self._turns)))
        if self._template.marks_generation and set(loss_on) <= {"assistant"}:
            self._check_whole("".join(marked[start:end] for start, end in spans), wanted)
            return [self._encode(marked, [(*span, "assistant") for span in spans])]
        try:
            return [self._document(len(self._turns), wanted)]
        except _Unstable:
            pass
        starts = [i for i, turn in enumerate(self._turns) if turn["role"] == "user" and i]
        documents = []
        first = 0
        for stop in (*starts, len(self._turns)):
            own = [i for i in wanted if first <= i < stop]
            first = stop
            if own:
                try:
                    documents.append(self._document(stop, own))
                except _Unstable as error:
                    raise UserError(
                        f"{self._template.where} shows message {error.index + 1} otherwise when "
                        "more turns follow, so that it cannot be told which tokens are whose: give "
                        "the template {% generation %} blocks around what the assistant says"
                    ) from error
        return documents

    def _document(self, stop: int, wanted: Sequence[int]) -> Encoded:
        """The first `stop` turns, with those that are wanted marked."""
        text = self._plain(stop)
        spans = []
        for index in wanted:
            after = self._plain(index + 1)
            if not text.startswith(after):
                raise _Unstable(index)
            start = self._start(index, after, text)
            spans.append((start, start + len(self._cut(after[start:])), self._role(index)))
        return self._encode(text, spans)

    def said(self, index: int) -> str:
        text, spans = self._template.generated(self._render(index + 1))
        if self._template.marks_generation and spans:
            start, end = spans[-1]
            return text[start:end]
        return self._cut(text[self._start(index, text, text) :])

    def _start(self, index: int, after: str, text: str) -> int:
        """Where a turn's content starts in the rendering that ends with it."""
        role = self._role(index)
        if role == "assistant":
            prompt = self._plain(index, opening=True)
            if not after.startswith(prompt):
                raise UserError(
                    f"{self._template.where} opens an assistant's turn otherwise than it shows a "
                    f"finished one (message {index + 1}), so that it cannot be told what the model "
                    "has to say: give it {% generation %} blocks around that"
                )
            self._check_whole(after[len(prompt) :], [index])
            return len(prompt)
        before = self._plain(index) if index else ""
        if not text.startswith(before):
            raise _Unstable(index - 1)
        content = self._messages[index]["content"].strip()
        start = after.find(content, len(before))
        if not content or start < 0:
            raise UserError(
                f"{self._template.where} does not show the content of message {index + 1} (role "
                f"{role}) as it is: take the role out of loss_on"
            )
        return start

    def _check_whole(self, text: str, wanted: Sequence[int]) -> None:
        """What is to be learned must be there: templates drop what they do not know."""
        for index in wanted:
            message = self._messages[index]
            content = message["content"].rpartition(END_THINK)[2].strip()
            reasoning = message.get("reasoning_content", "").strip()
            if self._template.marks_generation:
                reasoning = ""  # what it keeps of earlier turns is the template's choice
            for name, part in (("content", content), ("reasoning", reasoning)):
                if part not in text:
                    raise UserError(
                        f"{self._template.where} does not show the {name} of message {index + 1}: "
                        "write it as the template expects it (reasoning in the content, between "
                        f"{THINK} and {END_THINK}, where it knows no `reasoning_content`)"
                    )

    def _cut(self, text: str) -> str:
        return text[: self._template.end_of_turn(text)]

    def _role(self, index: int) -> str:
        return self._turns[index]["role"]

    def _plain(self, stop: int, opening: bool = False) -> str:
        return self._template.generated(self._render(stop, opening))[0]

    def _render(self, stop: int, opening: bool = False) -> str:
        return self._template.render(self._messages[:stop], opening, tools=self._tools)

    def _encode(self, text: str, spans: Sequence[tuple[int, int, str]]) -> Encoded:
        """Encoded piece by piece, as a prompt is apart from what is sampled after it."""
        encoded = Encoded([], [])
        at = 0
        for start, end, role in (*spans, (len(text), len(text), "")):
            for part, owner in ((text[at:start], 0), (text[start:end], _number(role))):
                ids = self._template.encode(part)
                encoded.ids.extend(ids)
                encoded.roles.extend([owner] * len(ids))
            at = end
        return encoded


class _Unstable(Exception):
    """Message number `index` is shown otherwise when more turns follow."""

    def __init__(self, index: int) -> None:
        self.index = index


def _number(role: str) -> int:
    return 1 + ROLES.index(role) if role else 0


def _hidden(message: Message, template: ChatTemplate) -> dict[str, Any]:
    """A message for a template, which may know reasoning by either name."""
    own = _OWN if message["role"] == "assistant" else ()
    hidden: dict[str, Any] = template.hide({**message, "content": "", "role": ""})
    hidden["role"] = message["role"]
    hidden["content"] = template.hide(message["content"], own)
    if "reasoning_content" in hidden:
        hidden["reasoning"] = hidden["reasoning_content"]
    return hidden
