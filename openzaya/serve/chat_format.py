"""How a conversation becomes tokens: in our own format, or by a checkpoint's template.

Both keep two promises. Names of control tokens that somebody types stay text. And what the model
has sampled goes back into its prompt as the very tokens it sampled, since re-encoding their text
may give others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from openzaya.data.chat import Message, encode_chat
from openzaya.data.template import ChatTemplate
from openzaya.data.tokenizer import END_THINK, IM_END, THINK, Tokenizer


@dataclass(frozen=True)
class Turn:
    """One message.

    Attributes:
        content: its text.
        ids: the tokens of `content` where a model has sampled them.
    """

    role: str
    content: str
    ids: list[int] | None = None


@dataclass(frozen=True)
class Prompt:
    """A conversation, ready for the model to go on.

    Attributes:
        ids: all of it.
        settled: how many of `ids` come before the opening of the assistant's turn.
        opened: what of the answer the prompt already says: `<think>` and a line break, or nothing.
        opened_ids: the tokens of that.
    """

    ids: list[int]
    settled: int
    opened: str
    opened_ids: list[int]


class ChatFormat(Protocol):
    """What a session needs to know about a format."""

    stop_ids: tuple[int, ...]
    """Tokens that end a turn, beside the end of text."""

    rewrites_history: bool
    """Whether a later prompt may show earlier turns otherwise, as templates that drop reasoning."""

    def prompt(self, turns: Sequence[Turn], thinking: bool) -> Prompt:
        """The conversation with an assistant's turn opened, and its reasoning if `thinking`."""


class NativeFormat:
    """The format of `openzaya.data.chat`.

    Raises:
        UserError: if the tokenizer lacks the markers of turns.
    """

    rewrites_history = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._header = encode_chat([], tokenizer, add_generation_prompt=True)[0]
        nothing: Message = {"role": "assistant", "content": ""}
        self._closing = encode_chat([nothing], tokenizer)[0][len(self._header) :]
        self.stop_ids: tuple[int, ...] = (self._closing[0],)

    def prompt(self, turns: Sequence[Turn], thinking: bool) -> Prompt:
        """See `ChatFormat`."""
        ids: list[int] = []
        for turn in turns:
            if turn.ids is None:
                message: Message = {"role": turn.role, "content": turn.content}
                ids += encode_chat([message], self._tokenizer)[0]
            else:
                ids += [*self._header, *turn.ids, *self._closing]
        opening = encode_chat([], self._tokenizer, True, thinking)[0]
        opened = f"{THINK}\n" if thinking else ""
        return Prompt([*ids, *opening], len(ids), opened, opening[len(self._header) :])


@dataclass
class TemplateFormat:
    """A checkpoint's own Jinja template, rendered in a sandbox as `transformers` renders it.

    Args:
        tokenizer: the checkpoint's.
        source: the template.
        control: names of all tokens that must not come out of anybody's text.
        tokens: what templates call `bos_token`, `eos_token` and so on.
        ends: further ids that end a turn.
        where: the template's file, for errors.

    Raises:
        UserError: if the template is malformed.
    """

    tokenizer: Tokenizer
    source: str
    control: Sequence[str]
    tokens: dict[str, str] = field(default_factory=dict)
    ends: Sequence[int] = ()
    where: str = "the chat template"
    rewrites_history = True

    def __post_init__(self) -> None:
        self._template = ChatTemplate(
            self.tokenizer, self.source, self.control, self.tokens, self.where
        )
        names = {IM_END, self.tokens.get("eos_token", "")}
        found = (self.tokenizer.token_id(name) for name in sorted(names) if name)
        self.stop_ids = (*self.ends, *(token for token in found if token is not None))

    def prompt(self, turns: Sequence[Turn], thinking: bool) -> Prompt:
        """See `ChatFormat`."""
        contents = [self._hide_names(turn) for turn in turns]
        before = self._render(turns, contents, False, thinking)
        text = self._render(turns, contents, True, thinking)
        if not text.startswith(before):
            before = ""
        tail = text[len(before) :]
        at = tail.rfind(THINK)
        opened = tail[at:] if at > tail.rfind(END_THINK) else ""
        settled = self._encode(before, turns, contents)
        ids = self._encode(text, turns, contents)
        if ids[: len(settled)] != settled:
            settled = []
        return Prompt(ids, len(settled), opened, self._encode(opened, (), ()))

    def _hide_names(self, turn: Turn) -> str:
        """The content with names of control tokens replaced by marks that no token is called."""
        own = (THINK, END_THINK) if turn.role == "assistant" else ()
        return str(self._template.hide(turn.content, own))

    def _render(
        self, turns: Sequence[Turn], contents: Sequence[str], opening: bool, thinking: bool
    ) -> str:
        messages = [
            {"role": turn.role, "content": content}
            for turn, content in zip(turns, contents, strict=True)
        ]
        return self._template.generated(self._template.render(messages, opening, thinking))[0]

    def _encode(self, text: str, turns: Sequence[Turn], contents: Sequence[str]) -> list[int]:
        """Ids of rendered text, with sampled turns as they were sampled."""
        ids: list[int] = []
        start = seek = 0
        for turn, content in zip(turns, contents, strict=True):
            content = content if turn.ids else content.strip()
            at = text.find(content, seek) if content else -1
            if at < 0:
                continue  # shortened by the template
            seek = at + len(content)
            if turn.ids:
                ids += self._template.encode(text[start:at]) + turn.ids
                start = seek
        return ids + self._template.encode(text[start:])
