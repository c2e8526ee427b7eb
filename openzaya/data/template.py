"""Chat templates of other models: Jinja, rendered in a sandbox as `transformers` renders it.

Text that people wrote goes through a template with the names of control tokens replaced by marks
that no token is called, and is spelled out afterwards: nobody can open a turn by typing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from openzaya.data.chat import CHAT_TEMPLATE
from openzaya.data.tokenizer import (
    SPECIAL_TOKENS,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    Tokenizer,
)
from openzaya.errors import UserError

TEMPLATE_FILE = "chat_template.jinja"

# Noncharacters, which no text holds: around the number of a name, and around what is generated.
_NAME, _END_NAME, _OPEN, _CLOSE = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
_MARKED = re.compile(f"{_NAME}(\\d+){_END_NAME}")
_RESERVED = re.compile(f"[{_NAME}-{_CLOSE}]")


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: what an assistant says, by the template itself."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Macro) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


@dataclass
class ChatTemplate:
    """A template and the tokenizer that it belongs to.

    Args:
        tokenizer: the checkpoint's.
        source: the template.
        control: names of all tokens that must not come out of anybody's text.
        tokens: what templates call `bos_token`, `eos_token` and so on.
        where: the template's file, for errors.

    Raises:
        UserError: if the template is malformed.
    """

    tokenizer: Tokenizer
    source: str
    control: Sequence[str]
    tokens: dict[str, str] = field(default_factory=dict)
    where: str = "the chat template"

    def __post_init__(self) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        # Unlike Jinja's own filter: not escaped for HTML.
        environment.filters["tojson"] = _to_json
        try:
            self._template = environment.from_string(self.source)
        except jinja2.TemplateError as error:
            raise UserError(
                f"{self.where} cannot be read: {error}. Remove chat_template to chat in the "
                "format of openzaya.data.chat"
            ) from error
        self.marks_generation = re.search(r"{%-?\s*generation\s*-?%}", self.source) is not None
        self._marks = {n: f"{_NAME}{i}{_END_NAME}" for i, n in enumerate(self.control) if n}
        self._speller = self.tokenizer.spelling_out(self._marks)
        longest_first = sorted(self._marks, key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def __reduce__(self) -> tuple[Any, ...]:  # Jinja's own objects cannot be pickled
        return ChatTemplate, (self.tokenizer, self.source, self.control, self.tokens, self.where)

    def hide(self, value: Any, own: Sequence[str] = ()) -> Any:
        """A text, or data with texts in it, with marks for the names of control tokens.

        Args:
            own: names that may stand for their tokens.
        """
        if isinstance(value, str):
            value = _RESERVED.sub("\ufffd", value)
            return self._names.sub(
                lambda match: match[0] if match[0] in own else self._marks[match[0]], value
            )
        if isinstance(value, dict):
            return {self.hide(key): self.hide(item, own) for key, item in value.items()}
        if isinstance(value, list):
            return [self.hide(item, own) for item in value]
        return value

    def show(self, text: str) -> str:
        """Rendered text as people read it: no marks."""
        text = text.replace(_OPEN, "").replace(_CLOSE, "")
        return _MARKED.sub(lambda match: self.control[int(match[1])], text)

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        opening: bool,
        thinking: bool | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> str:
        """The conversation as the template shows it, generated parts marked if it says which.

        Args:
            messages: with names hidden.
            opening: open an assistant's turn at the end.
            thinking: what templates call `enable_thinking`; None leaves it undefined.
            tools: functions that may be called, names hidden.

        Raises:
            UserError: if the template cannot show such a conversation.
        """
        choice = {} if thinking is None else {"enable_thinking": thinking}
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=opening,
                tools=tools or None,
                documents=None,
                **choice,
                **self.tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages))
            raise UserError(
                f"{self.where} cannot show this conversation: {error}. It knows other roles or "
                f"another order of turns; here they are {roles or 'none'}"
            ) from error

    def generated(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """Rendered text without the marks of generated parts, and where those parts are."""
        spans, plain, start = [], "", 0
        for piece in re.split(f"([{_OPEN}{_CLOSE}])", text):
            if piece == _OPEN:
                start = len(plain)
            elif piece == _CLOSE:
                spans.append((start, len(plain)))
            else:
                plain += piece
        return plain, spans

    def end_of_turn(self, text: str) -> int:
        """Where the last control token of a turn ends, if but white space follows; else its end."""
        end = max((match.end() for match in self._names.finditer(text)), default=0)
        return end if end and not text[end:].strip() else len(text)

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text; marks are spelled out as what they stand for."""
        ids: list[int] = []
        for number, part in enumerate(_MARKED.split(text)):
            if number % 2:
                ids += self._speller.encode(self.control[int(part)])
            elif part:
                ids += self.tokenizer.encode(part, special=True)
        return ids


def read_template(folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template in a checkpoint's folder; None if it has none, or ours.

    Ours is better encoded by its own code (`openzaya.data.chat`).

    Raises:
        UserError: if a file or the template cannot be read.
    """
    config = read_json(folder / TOKENIZER_CONFIG_FILE)
    source, where = config.get("chat_template"), folder / TOKENIZER_CONFIG_FILE
    if (folder / TEMPLATE_FILE).is_file():
        where = folder / TEMPLATE_FILE
        try:
            source = where.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"{where} cannot be read: {error}; copy it again") from error
    if isinstance(source, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default", next(iter(named.values()), None))
    if not source or source == CHAT_TEMPLATE:
        return None
    tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None:
            tokens[name] = token
    added = read_json(folder / TOKENIZER_FILE).get("added_tokens", [])
    control = [t["content"] for t in added if _is_control(t["content"], t["special"], source)]
    return ChatTemplate(tokenizer, source, control, tokens, str(where))


def read_json(file: Path) -> dict[str, Any]:
    """The table in a JSON file, empty if there is no file.

    Raises:
        UserError: if it cannot be read.
    """
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}; download or save it again") from error
    return content


def _is_control(name: str, special: bool, source: str) -> bool:
    """Whether an added token is one that nobody may write by typing.

    Tokenizers also add line breaks, spaces and tags of HTML, which are text like any other, and
    often do not call special what their template writes around calls and reasoning.
    """
    return bool(name.strip()) and (special or name in source or name in SPECIAL_TOKENS)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
