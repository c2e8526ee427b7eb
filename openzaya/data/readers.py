"""Row number k of one source, for any k: an epoch and a place in it, never a stream to rewind.

Three ways to fill a row: a window over running text, whole documents packed beforehand, or tasks
generated on the spot. `batches.py` decides which row of which source comes when.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from typing import Protocol

import numpy as np

from openzaya.config.recipe import SourceConfig
from openzaya.data import tasks
from openzaya.data.conversations import ChatEncoder, Conversation
from openzaya.data.packing import Document, Row, best_fit, packed_row, window_row
from openzaya.data.permutation import permute
from openzaya.data.rng import Rng, hash64
from openzaya.data.shards import Side
from openzaya.errors import UserError

_PROBES = 64
_MISSES = 4  # as many tasks in a row that do not fit end a row


class RowReader(Protocol):
    """Rows of one source in one context length."""

    def row(self, ordinal: int) -> Row:
        """Row number `ordinal`, counted from 0 without end."""
        ...


class WindowReader:
    """Windows over all documents of a side laid end to end, cut wherever the grid falls.

    The text is read as a ring: each epoch shifts the grid by a hashed distance, so that windows
    differ between epochs, and a computed permutation orders the epoch's windows.
    """

    def __init__(self, side: Side, context: int, name: str, *keys: int | str) -> None:
        """Raises: UserError if there are fewer than context + 1 tokens."""
        if len(side.tokens) < context + 1:
            raise UserError(
                f"source {name!r} has {len(side.tokens)} tokens to train on, but one window of "
                f"context {context} needs {context + 1}: add text or shorten the context"
            )
        self._side, self._context, self._key = side, context, hash64(*keys)
        self.per_epoch = len(side.tokens) // context

    def row(self, ordinal: int) -> Row:
        """A window of context + 1 tokens."""
        epoch, place = divmod(ordinal, self.per_epoch)
        size = len(self._side.tokens)
        shift = hash64("shift", epoch, self._key) % size
        window = permute(place, self.per_epoch, "window", epoch, self._key)
        return self.at((shift + window * self._context) % size)

    def at(self, start: int) -> Row:
        """The window that starts at a token; it goes on at the first token after the last."""
        size, end = len(self._side.tokens), start + self._context + 1
        tokens = self._side.tokens[start:end]
        starts = self._side.starts(start, min(end, size)) - start
        if end > size:
            tokens = np.concatenate([tokens, self._side.tokens[: end - size]])
            starts = np.concatenate([starts, self._side.starts(0, end - size) + size - start])
        return window_row(tokens.astype(np.int64), starts)


class WholeReader:
    """Whole documents, packed.

    Which documents share a row is settled once, by best-fit decreasing over their lengths: they
    cannot see each other, so it does not matter that an epoch keeps the company of the last one.
    What changes by epoch is the order of the rows, a computed permutation. Documents longer than
    the context are dropped and counted.
    """

    def __init__(self, side: Side, context: int, pad_id: int, name: str, *keys: int | str) -> None:
        """Raises: UserError if every document is longer than the context."""
        lengths = np.diff(np.asarray(side.offsets))
        packs = best_fit(lengths, context)
        self.dropped = int((lengths > context).sum())
        if not packs:
            shortest = f"the shortest has {lengths.min()} tokens" if len(lengths) else "none at all"
            raise UserError(
                f"source {name!r} has no document that fits whole into the context of {context} "
                f"({shortest}): lengthen the context or set whole = false"
            )
        self._documents = np.array([d for pack in packs for d in pack], np.int64)
        self._borders = np.cumsum([0, *map(len, packs)])
        self.per_epoch = len(packs)
        self._side, self._context, self._pad_id = side, context, pad_id
        self._key = hash64(*keys)

    def row(self, ordinal: int) -> Row:
        """One pack of documents."""
        epoch, place = divmod(ordinal, self.per_epoch)
        pack = permute(place, self.per_epoch, "pack", epoch, self._key)
        members = self._documents[self._borders[pack] : self._borders[pack + 1]].tolist()
        texts = ((self._side.document(d), self._side.document_mask(d)) for d in members)
        return packed_row(texts, self._context, self._pad_id)


class TaskReader:
    """Generated tasks, as many as fit; row k depends on nothing but the keys and k."""

    def __init__(
        self,
        source: SourceConfig,
        chat: ChatEncoder,
        context: int,
        name: str,
        *keys: int | str,
        heldout: bool = False,
    ) -> None:
        """Raises: UserError for unknown kinds, talk alone in evaluation, or too small a context."""
        kinds = tasks.select(source.tasks, name)
        if heldout:
            kinds = tuple(kind for kind in kinds if kind in tasks.VERIFIABLE)
            if not kinds:
                raise UserError(
                    f"source {name!r} generates nothing but talk, which has no held-out side: "
                    "leave it out of the evaluation or add another kind of task"
                )
        self._kinds, self._heldout = kinds, heldout
        self._chat, self._turns = chat if source.style == "chat" else None, source.turns
        self._loss_on = source.loss_on
        self._tokenizer, self._context = chat.tokenizer, context
        self._seed = hash64("tasks", name, *keys)
        lengths = sorted(len(ids) for ids, _ in islice(self._documents(0), _PROBES))
        if lengths[_PROBES // 2] > context:
            # Half must fit, so that no row of a long run ever goes without.
            raise UserError(
                f"source {name!r}: most tasks do not fit into the context of {context} tokens "
                f"(they have {lengths[0]} to {lengths[-1]}): lengthen it, or enlarge the vocabulary"
            )

    def row(self, ordinal: int) -> Row:
        """Tasks until several in a row do not fit, then padding."""
        chosen: list[Document] = []
        room, misses = self._context, 0
        for document in self._documents(ordinal):
            if len(document[0]) <= room:
                chosen.append(document)
                room, misses = room - len(document[0]), 0
                continue
            misses += 1
            if chosen and misses == _MISSES:
                break
        return packed_row(chosen, self._context, self._tokenizer.pad_id)

    def _documents(self, ordinal: int) -> Iterator[Document]:
        seed = hash64(self._seed, ordinal)
        for j in count():
            if self._chat is not None:
                turns = Rng("turns", seed, j).between(1, self._turns)
                drawn = [self._task(seed, j * self._turns + turn) for turn in range(turns)]
                messages = [message for task in drawn for message in tasks.as_chat(task)]
                conversation = Conversation(messages, where="a generated task")
                for ids, roles in self._chat.encode(conversation, self._loss_on):
                    yield ids, [int(role > 0) for role in roles]
            else:
                ids = self._tokenizer.encode(tasks.as_plain(self._task(seed, j)))
                yield [*ids, self._tokenizer.eos_id], None

    def _task(self, seed: int, index: int) -> tasks.Task:
        kind = tasks.choose_kind(self._kinds, seed, index)
        return tasks.make(kind, seed, index, self._heldout)
