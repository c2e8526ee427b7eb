"""Documents to ids, in this process or in several, always in the order of the corpus.

The corpus is cut into units of some megabytes. Each is encoded on its own, so that it does not
matter who does it or when; results are handed out in the order of the units.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from openzaya.config.recipe import SourceConfig
from openzaya.data.conversations import ChatEncoder
from openzaya.data.rng import text_hash
from openzaya.data.sources import PIECE_BYTES, Corpus, Piece
from openzaya.data.tokenizer import Tokenizer
from openzaya.errors import UserError

Result = TypeVar("Result")

UNIT_PIECES = 1024
_AHEAD = 4  # units a worker that may be under way or wait for their turn
_BATCH_CHARACTERS = 1 << 20
_PIECE_CHARACTERS = 200_000


@dataclass(frozen=True)
class Unit:
    """Neighbouring pieces that are encoded together; `skip` of their texts are left out."""

    index: int
    pieces: tuple[Piece, ...]
    skip: int = 0

    @property
    def nbytes(self) -> int:
        """How much there is to read."""
        return sum(piece.nbytes for piece in self.pieces)


@dataclass(frozen=True)
class Encoded:
    """The documents of one unit.

    Attributes:
        unit: Where they come from.
        tokens: Ids of all documents, [tokens], of `token_dtype`. Texts end with the eos id,
            conversations as their format ends them.
        lengths: Tokens of each document, int64 [documents].
        counts: Documents that each text or conversation became, int64 [texts].
        hashes: `text_hash` of each, uint64 [texts].
        sizes: UTF-8 bytes of each, int64 [texts].
        mask: 1 where a token is to be learned, uint8 [tokens]; None where all are.
    """

    unit: Unit
    tokens: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    hashes: npt.NDArray[np.uint64]
    sizes: npt.NDArray[np.int64]
    mask: npt.NDArray[np.uint8] | None = None


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest type that holds every id."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def units(corpus: Corpus) -> Iterator[Unit]:
    """The corpus in units of at least `PIECE_BYTES`: the same ones in every process."""
    held: list[Piece] = []
    size = index = 0
    for piece in corpus.pieces():
        held.append(piece)
        size += piece.nbytes
        if size >= PIECE_BYTES or len(held) == UNIT_PIECES:
            yield Unit(index, tuple(held))
            held, size, index = [], 0, index + 1
    if held:
        yield Unit(index, tuple(held))


def encode_unit(corpus: Corpus, unit: Unit, chat: ChatEncoder) -> Encoded:
    """Reads and encodes one unit; conversations as `chat` says, texts with its tokenizer.

    Raises:
        UserError: as reading and encoding do.
    """
    dtype = token_dtype(chat.tokenizer.vocab_size)
    masked = corpus.source.kind == "chat"
    texts = _conversations if masked else _texts
    tokens: list[npt.NDArray[Any]] = [np.zeros(0, dtype)]
    masks = [np.zeros(0, np.uint8)]
    lengths: list[int] = []
    counts: list[int] = []
    hashes: list[int] = []
    sizes: list[int] = []
    for text, made in texts(corpus, unit, chat):
        for ids, roles in made:
            tokens.append(np.asarray(ids, dtype))
            lengths.append(len(ids))
            if masked:
                masks.append((np.asarray(roles) > 0).astype(np.uint8))
        content = text.encode("utf-8", "surrogatepass")
        counts.append(len(made))
        hashes.append(text_hash(content))
        sizes.append(len(content))
    return Encoded(
        unit,
        np.concatenate(tokens),
        np.array(lengths, np.int64),
        np.array(counts, np.int64),
        np.array(hashes, np.uint64),
        np.array(sizes, np.int64),
        np.concatenate(masks) if masked else None,
    )


# A text or all that a conversation says, and the documents it becomes: ids, and whose each is.
_Made = tuple[str, Sequence[tuple[Sequence[int], Sequence[int]]]]


def _texts(corpus: Corpus, unit: Unit, chat: ChatEncoder) -> Iterator[_Made]:
    tokenizer = chat.tokenizer
    found = (text for piece in unit.pieces for text in corpus.read(piece))
    for texts in _batches(islice(found, unit.skip, None)):
        for text, ids in zip(texts, _encode(texts, tokenizer), strict=True):
            yield text, [([*ids, tokenizer.eos_id], ())]


def _conversations(corpus: Corpus, unit: Unit, chat: ChatEncoder) -> Iterator[_Made]:
    loss_on = corpus.source.loss_on
    found = (talk for piece in unit.pieces for talk in corpus.conversations(piece))
    for conversation in islice(found, unit.skip, None):
        if chat.check is not None:
            chat.check(conversation, chat)
        made = chat.encode(conversation, loss_on)
        if not any(any(roles) for _, roles in made):
            raise UserError(
                f"{conversation.where}: nothing to learn: no turn of {', '.join(loss_on)}; leave "
                "the row out, or name other roles in loss_on"
            )
        yield conversation.text, made


def encode_all(
    corpus: Corpus, todo: Iterable[Unit], chat: ChatEncoder, workers: int
) -> Iterator[Encoded]:
    """Encodes units, in their order.

    Args:
        corpus: Where they come from.
        todo: Read as far as there is work for.
        chat: Encodes conversations; its tokenizer encodes texts, and reads no name in them as a
            special token.
        workers: As for `map_units`; 0 takes as many threads as the tokenizer's library likes.

    Raises:
        UserError: as reading does, or if a process dies.
    """
    return map_units(corpus, todo, partial(encode_unit, chat=chat), workers)


def map_units(
    corpus: Corpus, todo: Iterable[Unit], work: Callable[[Corpus, Unit], Result], workers: int
) -> Iterator[Result]:
    """What `work` makes of units, in their order.

    Args:
        corpus: Where they come from.
        todo: Read as far as there is work for.
        work: A function of a module, or a `partial` of one: it must be pickled.
        workers: Processes, one core each; 0 does it here.

    Raises:
        UserError: as `work` does, or if a process dies.
    """
    if not workers:
        for unit in todo:
            yield work(corpus, unit)
        return
    pool = _Pool(corpus, work, workers)
    try:
        yield from pool.run(iter(todo))
    finally:
        pool.close()


class _Pool(Generic[Result]):
    """Processes that work on units, each one at a time.

    By hand, as `concurrent.futures` would have them keep the tokenizer in a global variable.
    """

    def __init__(
        self, corpus: Corpus, work: Callable[[Corpus, Unit], Result], workers: int
    ) -> None:
        # Spawned: a fork would copy the locks of threads that the tokenizer or torch has started.
        context = multiprocessing.get_context("spawn")
        self._processes: dict[Connection, BaseProcess] = {}
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(corpus.source, corpus.name, work, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes[ours] = process

    def run(self, todo: Iterator[Unit]) -> Iterator[Result]:
        """Hands out units as processes become free, and yields the results in order."""
        idle, busy = list(self._processes), set[Connection]()
        results: dict[int, Result | Exception] = {}
        order: list[int] = []  # units under way or waiting, from `position` on
        position = 0
        more = True
        while True:
            while more and idle and len(order) - position < _AHEAD * len(self._processes):
                unit = next(todo, None)
                more = unit is not None
                if unit is not None:
                    order.append(unit.index)
                    busy.add(idle[-1])
                    self._send(idle.pop(), unit)
            if position < len(order) and order[position] in results:
                result = results.pop(order[position])
                position += 1
                if isinstance(result, Exception):
                    raise result
                yield result
                continue
            if not busy:
                return
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                index, result = self._receive(connection)
                results[index] = result
                busy.remove(connection)
                idle.append(connection)

    def _send(self, connection: Connection, unit: Unit) -> None:
        try:
            connection.send(unit)
        except OSError as error:
            raise self._dead(connection) from error

    def _receive(self, connection: Connection) -> tuple[int, Result | Exception]:
        try:
            index, result = connection.recv()
        except (EOFError, OSError) as error:
            raise self._dead(connection) from error
        return index, result

    def _dead(self, connection: Connection) -> UserError:
        process = self._processes[connection]
        process.join(1)
        return UserError(
            f"a process that reads and encodes has died (exit code {process.exitcode}), perhaps "
            "for want of memory: use fewer workers"
        )

    def close(self) -> None:
        """Ends the processes."""
        for connection, process in self._processes.items():
            connection.close()
            process.terminate()
        for process in self._processes.values():
            process.join()


def _serve(
    source: SourceConfig,
    name: str,
    work: Callable[[Corpus, Unit], Any],
    connection: Connection,
) -> None:  # pragma: no cover - runs in another process
    """Works on what comes through the connection, until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the first process decides
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with suppress(EOFError, OSError):
        corpus = Corpus(source, name)
        while True:
            unit: Unit = connection.recv()
            try:
                result = work(corpus, unit)
            except (UserError, OSError) as error:
                result = error
            connection.send((unit.index, result))


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Groups of documents of about a megabyte, to keep every core busy."""
    held: list[str] = []
    size = 0
    for text in texts:
        held.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield held
            held, size = [], 0
    if held:
        yield held


def _encode(texts: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Ids of every text; long ones are encoded in pieces, which bounds the memory they take."""
    pieces = [split_long(text) for text in texts]
    encoded = iter(tokenizer.encode_batch([part for parts in pieces for part in parts]))
    return [[i for _ in parts for i in next(encoded)] for parts in pieces]


def split_long(text: str) -> list[str]:
    """Cuts a long text after single line ends, where no token of a byte-level BPE reaches over."""
    pieces, start = [], 0
    border = re.compile(r"\S\n(?=\S)")
    while len(text) - start > _PIECE_CHARACTERS:
        match = border.search(text, start + _PIECE_CHARACTERS)
        if match is None:
            break
        pieces.append(text[start : match.end()])
        start = match.end()
    return [*pieces, text[start:]]
