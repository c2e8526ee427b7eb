"""Answer-preserving trimming: conversations made to fit a context without losing an answer.

Reasoning is what is long, and the answer stands behind it: whoever cuts at the context's end trains
a model to think and never to answer. So reasoning is cut instead, and only where there is no way
around it:

1. A conversation that fits stays as it is.
2. Otherwise the last assistant's reasoning loses its tail, the part right before the answer, so
   that the conversation fills the context exactly.
3. If that is not enough, the reasoning of all earlier turns goes, and their answers stay; then 2
   again.
4. What is too long even so is dropped: its answers alone exceed the context.

It is done beforehand, once for each context that is trained with, always from the full text.

Source: ZAYA1-8B technical report, section III-A.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from openzaya.data.chat import Message
from openzaya.data.conversations import ChatEncoder, Conversation
from openzaya.data.encode import Unit, map_units, units
from openzaya.data.sources import Corpus
from openzaya.data.tokenizer import END_THINK, THINK, Tokenizer

_PROBES = 8
_LOSS_ON = ("assistant",)
_REASONING = ("reasoning_content", "reasoning")

AnyMessage = TypeVar("AnyMessage", Message, dict[str, Any])


@dataclass(frozen=True)
class Trimmed:
    """What became of a conversation.

    Attributes:
        conversation: None if it was dropped.
        before: Tokens of what it was; of the longest document, if it becomes several.
        after: Tokens of what it is, 0 if it was dropped; else at most the context.
        earlier: Whether earlier turns lost their reasoning.
        cut: Whether the last assistant's reasoning lost its tail, or all of it.
    """

    conversation: Conversation | None
    before: int
    after: int
    earlier: bool = False
    cut: bool = False


def trim(
    conversation: Conversation, chat: ChatEncoder, context: int, before: int | None = None
) -> Trimmed:
    """Makes a conversation fit.

    Args:
        conversation: Reasoning may be in `reasoning_content`, or lead the content as
            `<think>...</think>`.
        chat: The form in which tokens are counted.
        context: Tokens of the longest document that may come out.
        before: `tokens_of` the conversation, if it is known.

    Raises:
        UserError: as `ChatEncoder.encode`.
    """
    before = tokens_of(conversation, chat) if before is None else before
    if before <= context:
        return Trimmed(conversation, before, before)
    answers = [i for i, turn in enumerate(conversation.messages) if turn["role"] == "assistant"]
    if not answers:
        return Trimmed(None, before, 0)
    last = answers[-1]
    shorter = _cut_last(conversation, last, chat, context)
    if shorter is not None:
        return Trimmed(shorter, before, tokens_of(shorter, chat), cut=True)
    bare = _without_earlier(conversation, last)
    after = tokens_of(bare, chat)
    if after <= context:
        return Trimmed(bare, before, after, earlier=True)
    shorter = _cut_last(bare, last, chat, context)
    if shorter is not None:
        return Trimmed(shorter, before, tokens_of(shorter, chat), earlier=True, cut=True)
    return Trimmed(None, before, 0)


def tokens_of(conversation: Conversation, chat: ChatEncoder) -> int:
    """Tokens of the longest document that it becomes."""
    return max((len(made.ids) for made in chat.encode(conversation, _LOSS_ON)), default=0)


def _without_earlier(conversation: Conversation, last: int) -> Conversation:
    """No reasoning in turns before number `last`."""
    turns = enumerate(conversation.messages)
    return _with(conversation, (_reasoned(turn, "") if i < last else turn for i, turn in turns))


def _cut_last(
    conversation: Conversation, last: int, chat: ChatEncoder, context: int
) -> Conversation | None:
    """With the tail of turn `last`'s reasoning cut; None if it fits not even without any."""
    reasoning = reasoning_of(conversation.messages[last])

    def cut(characters: int) -> Conversation:
        messages = list(conversation.messages)
        messages[last] = _reasoned(messages[last], reasoning[:characters])
        return _with(conversation, messages)

    kept = _fill(reasoning, chat.tokenizer, lambda n: tokens_of(cut(n), chat), context)
    return None if kept is None else cut(kept)


def _fill(
    text: str, tokenizer: Tokenizer, length: Callable[[int], int], context: int
) -> int | None:
    """The characters of `text` that can be kept, from its start.

    Args:
        length: Tokens of the whole if so many characters are kept: nearly as many more as `text`
            has up to there, but tokens at the border may merge.
        context: The most that `length` may be; it is met exactly if a cut exists that does so.

    Returns:
        None if `length(0)` is too long.
    """
    if length(0) > context:
        return None
    ends = [0, *tokenizer.ends(text)]
    low, high = 0, len(ends) - 1  # tokens that fit, and that do not
    tokens = high - (length(len(text)) - context)
    for probe in count():
        if high - low < 2:
            break
        if probe >= _PROBES:  # never seen, but it must end
            tokens = (low + high) // 2
        tokens = min(max(tokens, low + 1), high - 1)
        found = length(ends[tokens])
        if found == context:
            return ends[tokens]
        if found < context:
            low = tokens
        else:
            high = tokens
        tokens += context - found
    # Tokens at the border have merged: look between the tokens as well, from the longest.
    best = ends[low]
    for characters in range(ends[high] - 1, ends[low], -1):
        found = length(characters)
        if found == context:
            return characters
        if found < context and characters > best:
            best = characters
    return best


def reasoning_of(message: Message | dict[str, Any]) -> str:
    """An assistant's reasoning, wherever it stands; "" if there is none."""
    if message["role"] != "assistant":
        return ""
    named = message.get("reasoning_content") or message.get("reasoning")
    return str(named) if named else _split(message["content"])[1]


def _split(content: str) -> tuple[str, str, str]:
    """A content in three: up to its reasoning, the reasoning, from its end on."""
    head, end, answer = content.rpartition(END_THINK)
    before, start, reasoning = head.partition(THINK)
    if not end or (start and before.strip()):
        return "", "", content
    if not start:  # the template opens it
        before, reasoning = "", head
    lead = reasoning[: len(reasoning) - len(reasoning.lstrip("\n"))]
    inner = reasoning[len(lead) :].rstrip("\n")
    return before + start + lead, inner, reasoning[len(lead) + len(inner) :] + end + answer


def _reasoned(message: AnyMessage, reasoning: str) -> AnyMessage:
    """The message with less reasoning; without any, nothing marks where it was."""
    if message["role"] != "assistant":
        return message
    changed = dict(message)
    names = [name for name in _REASONING if changed.get(name)]
    if names:
        for name in names:
            del changed[name]
        return changed | ({names[0]: reasoning} if reasoning else {})  # type: ignore[return-value]
    head, old, tail = _split(message["content"])
    if old:
        answer = tail.rpartition(END_THINK)[2].lstrip("\n")
        changed["content"] = head + reasoning + tail if reasoning else answer
    return changed  # type: ignore[return-value]


def _with(conversation: Conversation, messages: Iterable[Message]) -> Conversation:
    return replace(conversation, messages=list(messages))


@dataclass
class Counts:
    """What became of the conversations of a corpus at one context.

    Attributes:
        context: Tokens.
        whole: Conversations that fit as they were.
        cut: Those whose last reasoning lost its tail, and nothing else.
        earlier: Those whose earlier turns lost their reasoning, the last one's tail or not.
        dropped: Those whose answers alone are too long.
        exact: Those of `cut` and `earlier` that fill the context to the token.
        tokens_before: Of all conversations.
        tokens_after: Of those that are left.
    """

    context: int
    whole: int = 0
    cut: int = 0
    earlier: int = 0
    dropped: int = 0
    exact: int = 0
    tokens_before: int = 0
    tokens_after: int = 0

    def add(self, trimmed: Trimmed) -> None:
        """Counts one more."""
        if trimmed.conversation is None:
            self.dropped += 1
        elif trimmed.earlier:
            self.earlier += 1
        elif trimmed.cut:
            self.cut += 1
        else:
            self.whole += 1
        self.exact += (trimmed.cut or trimmed.earlier) and trimmed.after == self.context
        self.tokens_before += trimmed.before
        self.tokens_after += trimmed.after

    def merge(self, other: Counts) -> None:
        """Adds what was counted elsewhere."""
        for field in fields(self):
            if field.name != "context":
                old, more = getattr(self, field.name), getattr(other, field.name)
                setattr(self, field.name, old + more)


def trim_corpus(
    corpus: Corpus,
    chat: ChatEncoder,
    contexts: Sequence[int],
    folder: Path,
    workers: int = 0,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Counts]:
    """Writes `CONTEXT.jsonl` for every context: rows in their order, all else in them kept.

    Args:
        corpus: A chat source.
        chat: The form in which tokens are counted.
        contexts: Tokens, each a stage of training.
        folder: Where the files go; it exists.
        workers: Processes, one core each; 0 does it here.
        progress: Called with the bytes of every few megabytes that are done.

    Returns:
        The counts of every context.

    Raises:
        UserError: if a row is malformed, naming it, or there is no conversation at all.
        OSError: if a file cannot be written.
    """
    totals = [Counts(context) for context in contexts]
    work = partial(_trim_unit, chat=chat, contexts=tuple(contexts))
    with ExitStack() as stack:
        files = [
            stack.enter_context((folder / f"{context}.jsonl").open("w", encoding="utf-8"))
            for context in contexts
        ]
        for nbytes, results in map_units(corpus, units(corpus), work, workers):
            for file, total, (text, counts) in zip(files, totals, results, strict=True):
                file.write(text)
                total.merge(counts)
            progress(nbytes)
    if not totals[0].whole + totals[0].cut + totals[0].earlier + totals[0].dropped:
        raise corpus.empty()
    return totals


def _trim_unit(
    corpus: Corpus, unit: Unit, chat: ChatEncoder, contexts: Sequence[int]
) -> tuple[int, list[tuple[str, Counts]]]:
    """The lines of one unit, and what was counted, for every context."""
    lines: list[list[str]] = [[] for _ in contexts]
    counts = [Counts(context) for context in contexts]
    for row, conversation in _rows(corpus, unit):
        before = tokens_of(conversation, chat)
        for context, line, counted in zip(contexts, lines, counts, strict=True):
            trimmed = trim(conversation, chat, context, before)
            counted.add(trimmed)
            if trimmed.conversation is not None:
                line.append(_json(_row(row, conversation, trimmed.conversation)) + "\n")
    return unit.nbytes, [("".join(line), c) for line, c in zip(lines, counts, strict=True)]


def _rows(corpus: Corpus, unit: Unit) -> Iterator[tuple[dict[str, Any], Conversation]]:
    for piece in unit.pieces:
        yield from corpus.chat_rows(piece)


def _row(row: dict[str, Any], old: Conversation, new: Conversation) -> dict[str, Any]:
    """The row with the reasoning that is left; everything else, known or not, stays."""
    if new.messages == old.messages:
        return row
    raw = row["messages"]
    parsed = json.loads(raw) if isinstance(raw, str) else raw
    messages = []
    for message, before, after in zip(parsed, old.messages, new.messages, strict=True):
        if before != after:
            content = before["content"]  # parts are joined, null is no text
            message = _reasoned({**message, "content": content}, reasoning_of(after))
        messages.append(message)
    return {**row, "messages": _json(messages) if isinstance(raw, str) else messages}


def _json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # lone surrogates
        return json.dumps(value)
    return text


def as_table(counts: Sequence[Counts]) -> list[dict[str, Any]]:
    """The counts, for machines."""
    return [asdict(counted) for counted in counts]
