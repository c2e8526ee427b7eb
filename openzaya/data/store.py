"""Tokenised documents of one text source: encoded once, then read as memory-mapped files.

A cache folder holds for each side (train, heldout) the ids of all its documents one after another,
each ended by the eos id, and the offsets at which documents start. Conversations end as their chat
format ends them, and have a mask of the tokens that are to be learned. The folder's name is a
digest of everything its content depends on, so a changed source or tokenizer simply gets another
folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from openzaya.config.recipe import SourceConfig
from openzaya.data.conversations import ChatEncoder
from openzaya.data.rng import hash64
from openzaya.data.sources import conversations, documents, fingerprint
from openzaya.data.tokenizer import Tokenizer
from openzaya.errors import UserError

FORMAT = 1  # raise it whenever the same inputs would give other files
CHAT_FORMAT = 1  # the same for conversations
SIDES = ("train", "heldout")
_BATCH_CHARACTERS = 1 << 20
_PIECE_CHARACTERS = 200_000

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Side:
    """Documents of one side of a source.

    Attributes:
        tokens: Ids of all documents, [tokens], uint16 or uint32.
        offsets: Where documents start, and the end of the last one, [documents + 1].
        mask: 1 on tokens that are to be predicted, [tokens] uint8; None: all of them.
    """

    tokens: npt.NDArray[Any]
    offsets: npt.NDArray[np.int64]
    mask: npt.NDArray[np.uint8] | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def document(self, index: int) -> npt.NDArray[Any]:
        """Ids of one document, [length], the eos at its end included."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def document_mask(self, index: int) -> npt.NDArray[np.uint8] | None:
        """Mask of one document, [length]; None: everything is to be predicted."""
        if self.mask is None:
            return None
        return self.mask[self.offsets[index] : self.offsets[index + 1]]


@dataclass(frozen=True)
class TextStore:
    """A tokenised source.

    Attributes:
        train: What is trained on.
        heldout: What is kept for evaluation.
        digest: Changes with the documents, the tokenizer and the split.
    """

    train: Side
    heldout: Side
    digest: str


def is_heldout(index: int, text: str, share: float) -> bool:
    """Whether a document belongs to the held-out share, by a hash of its place and content."""
    return hash64("heldout", index, text) < share * 2.0**64


def open_store(
    name: str,
    source: SourceConfig,
    tokenizer: Tokenizer,
    cache_dir: str | Path,
    progress: Progress | None = None,
    chat: ChatEncoder | None = None,
) -> TextStore:
    """Opens the cached store of a source, and builds it first if there is none (or a broken one).

    With heldout > 0 and at least two documents, each side gets at least one. Several processes may
    open the same store at once: the first to finish wins, all read the same files.

    Args:
        name: The source's name in the recipe, for messages.
        source: Any kind but `tasks`.
        tokenizer: Encodes the documents; names in them are never read as special tokens.
        cache_dir: Created if missing.
        progress: Called with (documents, tokens) so far, about once per megabyte of text.
        chat: Encodes conversations; None takes our own format.

    Raises:
        UserError: as `documents` does, or if the cache cannot be written.
    """
    cache = Path(cache_dir)
    chat = chat or ChatEncoder(tokenizer)
    # What only shapes rows (`whole`, `style`) leaves the store as it is; `path` is in the content.
    relevant = source.model_dump(include={"kind", "field", "split", "separator", "heldout"})
    parts = [FORMAT, relevant, tokenizer.digest, fingerprint(source, name)]
    if source.kind == "chat":
        parts += [CHAT_FORMAT, source.loss_on, chat.digest]
    key = json.dumps(parts)
    folder = cache / hashlib.sha256(key.encode()).hexdigest()[:32]
    if (store := _read(folder)) is not None:
        return store
    try:
        cache.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=cache, prefix="building-"))
        try:
            _build(temporary, name, source, chat, progress)
            _put(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"source {name!r}: cannot write its tokens to the cache {cache}: {error.strerror}: "
            "free some room or choose another folder"
        ) from error
    store = _read(folder)
    if store is None:
        raise UserError(f"source {name!r}: the cache {folder} is damaged: delete it and try again")
    return store


def _put(temporary: Path, folder: Path) -> None:
    """Moves a finished store to its place, unless another process was faster."""
    temporary.chmod(0o755)  # mkdtemp's 0700 would shut other users out
    try:
        temporary.rename(folder)
    except OSError:  # there is one already: as good as ours, or damaged
        if _read(folder) is not None:
            return
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read(folder: Path) -> TextStore | None:
    """The store in a folder; None if it is missing or its files do not fit together."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        sides = []
        for side in SIDES:
            counts = meta[side]
            tokens = _map(folder / f"{side}.tokens", np.dtype(meta["dtype"]), counts["tokens"])
            offsets = _map(folder / f"{side}.offsets", np.dtype(np.int64), counts["documents"] + 1)
            if offsets[0] != 0 or offsets[-1] != len(tokens):
                return None
            mask = None
            if meta.get("masked"):
                mask = _map(folder / f"{side}.mask", np.dtype(np.uint8), counts["tokens"])
            sides.append(Side(tokens, offsets, mask))
        train, heldout = sides
        return TextStore(train, heldout, folder.name)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _map(path: Path, dtype: np.dtype[Any], length: int) -> npt.NDArray[Any]:
    if path.stat().st_size != length * dtype.itemsize:
        raise ValueError(f"{path} has the wrong size")
    if length == 0:
        return np.zeros(0, dtype)  # an empty file cannot be mapped
    return np.memmap(path, dtype=dtype, mode="r", shape=(length,))


# Ids and mask of every document that one text or conversation becomes.
_Encoded = list[tuple[list[int], list[int] | None]]


def _build(
    folder: Path,
    name: str,
    source: SourceConfig,
    chat: ChatEncoder,
    progress: Progress | None,
) -> None:
    """Encodes all documents into one file, settles the sides, then writes each side's files."""
    tokenizer = chat.tokenizer
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    masked = source.kind == "chat"
    encoded = _conversations(name, source, chat) if masked else _texts(name, source, tokenizer)
    offsets: list[int] = [0]
    draws: list[int] = []  # of every document
    everything, masks = folder / "all.tokens", folder / "all.mask"
    with everything.open("wb") as file, masks.open("wb") as mask_file:
        reported = 0
        for index, (text, made) in enumerate(encoded):
            draw = hash64("heldout", index, text)
            for ids, mask in made:
                np.asarray(ids, dtype).tofile(file)
                if mask is not None:
                    np.asarray(mask, np.uint8).tofile(mask_file)
                draws.append(draw)
                offsets.append(offsets[-1] + len(ids))
            reported += len(text)
            if progress is not None and reported >= _BATCH_CHARACTERS:
                progress(len(draws), offsets[-1])
                reported = 0
        if progress is not None:
            progress(len(draws), offsets[-1])
    heldout = _settle(np.array(draws, np.uint64), source.heldout)
    columns = {"tokens": _map(everything, dtype, offsets[-1])}
    if masked:
        columns["mask"] = _map(masks, np.dtype(np.uint8), offsets[-1])
    meta: dict[str, Any] = {"dtype": dtype.name, "masked": masked}
    for side, members in zip(SIDES, (~heldout, heldout), strict=True):
        meta[side] = _write_side(folder, side, columns, np.array(offsets), members)
    everything.unlink()
    masks.unlink()
    (folder / "meta.json").write_text(json.dumps(meta))
    for path in [*folder.iterdir(), folder]:
        _sync(path)


def _texts(name: str, source: SourceConfig, tokenizer: Tokenizer) -> Iterator[tuple[str, _Encoded]]:
    for texts in _batches(documents(source, name)):
        for text, ids in zip(texts, _encode(texts, tokenizer), strict=True):
            yield text, [([*ids, tokenizer.eos_id], None)]


def _conversations(
    name: str, source: SourceConfig, chat: ChatEncoder
) -> Iterator[tuple[str, _Encoded]]:
    """Raises: UserError if a conversation has nothing to learn, or cannot be encoded."""
    empty = True
    for conversation in conversations(source, name):
        empty = False
        if chat.check is not None:
            chat.check(conversation, chat)
        made = chat.encode(conversation, source.loss_on)
        if not any(map(any, (roles for _, roles in made))):
            raise UserError(
                f"{conversation.where}: nothing to learn: no turn of {', '.join(source.loss_on)}; "
                "leave the row out, or name other roles in loss_on"
            )
        yield (
            conversation.text,
            [(ids, [int(role > 0) for role in roles]) for ids, roles in made],
        )
    if empty:
        raise UserError(
            f"source {name!r} (kind {source.kind}, path {source.path!r}) holds no conversation: "
            "check its path"
        )


def _settle(draws: npt.NDArray[np.uint64], share: float) -> npt.NDArray[np.bool_]:
    """Which documents are held out, [documents]; neither side stays empty if both can have one.

    Documents that are one conversation share a draw, and so a side.
    """
    heldout = draws < share * 2.0**64
    if share > 0 and len(draws) >= 2:
        if not heldout.any():
            heldout[draws == draws.min()] = True
        elif heldout.all():
            heldout[draws == draws.max()] = False
    return heldout


def _write_side(
    folder: Path,
    side: str,
    columns: dict[str, npt.NDArray[Any]],
    offsets: npt.NDArray[np.int64],
    members: npt.NDArray[np.bool_],
) -> dict[str, int]:
    edges = np.concatenate([[0], np.cumsum(np.diff(offsets)[members])]).astype(np.int64)
    edges.tofile(folder / f"{side}.offsets")
    borders = np.flatnonzero(np.diff(np.concatenate([[0], members, [0]]).astype(np.int8)))
    for column, values in columns.items():
        with (folder / f"{side}.{column}").open("wb") as file:
            for first, stop in pairwise(borders.tolist()):
                if members[first]:  # a run of neighbouring documents of this side
                    values[offsets[first] : offsets[stop]].tofile(file)
    return {"documents": int(members.sum()), "tokens": int(edges[-1])}


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
