"""Builds a folder of token shards out of a corpus: in parallel, the same bytes for any number of
processes, and going on where an earlier build was stopped.

Processes encode units of the corpus (`encode.py`); this one takes the results in the order of the
corpus, settles the side of each document, and cuts shards at document borders. After each shard
the journal notes how far the corpus is done. The folder grows under a hidden name and gets its own
by one rename, so it is there whole or not at all.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from openzaya.config.recipe import SourceConfig
from openzaya.data.conversations import ChatEncoder
from openzaya.data.encode import Encoded, Unit, encode_all, token_dtype, units
from openzaya.data.shard_writer import JOURNAL, Cursor, Journal, ShardWriter, sync
from openzaya.data.shards import (
    FORMAT,
    MANIFEST,
    FileRecord,
    Manifest,
    Shard,
    describe_file,
    open_shards,
    read_manifest,
)
from openzaya.data.sources import Corpus
from openzaya.data.split import SIDES, heldout_draw, is_heldout
from openzaya.data.tokenizer import TOKENIZER_FILE, Tokenizer
from openzaya.errors import UserError

SHARD_TOKENS = 1 << 27
_LOCK = ".lock"
_SAMPLE_BYTES = 1 << 20


@dataclass(frozen=True)
class Done:
    """How far a build is.

    Attributes:
        documents: Encoded so far, earlier builds included.
        tokens: The same.
        text_bytes: UTF-8 bytes of their texts.
        read_bytes: Of the corpus; `Corpus.nbytes` when all is done.
    """

    documents: int
    tokens: int
    text_bytes: int
    read_bytes: int


Progress = Callable[[Done], None]
_Document = tuple[npt.NDArray[Any], npt.NDArray[np.uint8] | None]


@dataclass(frozen=True)
class Estimate:
    """What a corpus will become, by its first megabyte: tokens, and bytes on the disk."""

    corpus_bytes: int
    tokens: int
    disk_bytes: int


def estimate(corpus: Corpus, tokenizer: Tokenizer) -> Estimate:
    """Encodes the beginning of a corpus and scales it up.

    Raises:
        UserError: as reading does.
    """
    corpus_bytes = corpus.nbytes()
    texts = size = tokens = encoded = 0
    first = next(units(corpus), Unit(0, ()))
    for text in (text for piece in first.pieces for text in corpus.read(piece)):
        texts, size = texts + 1, size + len(text.encode("utf-8", "replace"))
        if encoded < _SAMPLE_BYTES:
            part = text[:_SAMPLE_BYTES]
            encoded += len(part.encode("utf-8", "replace"))
            tokens += len(tokenizer.encode(part)) + 1
    scale = corpus_bytes / max(first.nbytes, 1)
    expected = tokens * size / max(encoded, 1) * scale
    itemsize = token_dtype(tokenizer.vocab_size).itemsize + (corpus.source.kind == "chat")
    return Estimate(corpus_bytes, int(expected), int(expected * itemsize + texts * scale * 8))


def check_room(expected: Estimate, out: Path) -> None:
    """Raises: UserError if the disk of `out` has less room than shards are expected to take."""
    place = next(parent for parent in (out, *out.absolute().parents) if parent.is_dir())
    scratch = _scratch(out)
    there = sum(f.stat().st_size for f in scratch.iterdir()) if scratch.is_dir() else 0
    free = shutil.disk_usage(place).free
    if free + there < expected.disk_bytes:
        raise UserError(
            f"{out} will take about {expected.disk_bytes / 1e9:.2f} GB, but {place} has "
            f"{free / 1e9:.2f} GB free: free some room, or choose another folder"
        )


def build_shards(
    out: Path,
    source: SourceConfig,
    name: str,
    chat: ChatEncoder,
    shard_tokens: int = SHARD_TOKENS,
    workers: int = 0,
    cache: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Tokenises a source into a folder of shards, or finishes what an earlier call began.

    With heldout > 0 and at least two documents, each side gets at least one. All documents that a
    conversation becomes are on one side.

    Args:
        out: The folder; if it is there already, it must be of the same source and settings.
        source: Any kind that holds texts: neither `tasks` nor `shards`.
        name: The source's name, for messages.
        chat: Encodes conversations; its tokenizer encodes texts, and reads no name in them as a
            special token.
        shard_tokens: What a shard holds at most, unless one document alone is longer.
        workers: Processes beside this one; 0 encodes here, on all cores.
        cache: The folder's name stands for its content: where others would be refused, wait for
            another process that builds it, and replace what is damaged or of something else.
        progress: Called after every few megabytes.

    Raises:
        UserError: if the source cannot be read or is empty, if the folder or an unfinished build
            in its place is of something else, or if another process is at it.
        OSError: if the disk is full or cannot be written; what is complete stays, and the next
            call goes on from there.
    """
    if cache and (found := _whole(out)) is not None:
        return found
    with _locked(out, wait=cache) as scratch:
        if cache and (found := _whole(out)) is not None:
            return found  # another process was faster
        if cache:
            shutil.rmtree(out, ignore_errors=True)
        build = _Build(scratch, source, name, chat, shard_tokens, workers, progress)
        if out.exists():
            manifest = read_manifest(out)
            build.check_same(manifest, out)
        else:
            manifest = build.run(anew=cache)
            (scratch / MANIFEST).write_text(json.dumps(manifest.to_json(), indent=1) + "\n")
            sync(scratch / MANIFEST)
            sync(scratch)
            scratch.rename(out)
            sync(out.parent)
    for leftover in (JOURNAL, _LOCK):
        (out / leftover).unlink(missing_ok=True)
    return manifest


def _whole(folder: Path) -> Manifest | None:
    """The manifest of a folder that can be opened."""
    try:
        manifest = read_manifest(folder)
        open_shards(folder, manifest)
    except UserError:
        return None
    return manifest


def _scratch(out: Path) -> Path:
    return out.with_name(f".{out.name}.building")


@contextmanager
def _locked(out: Path, wait: bool) -> Iterator[Path]:
    """The folder in which `out` grows, with other processes kept out of it."""
    scratch = _scratch(out)
    while True:
        scratch.mkdir(parents=True, exist_ok=True)
        try:
            handle = (scratch / _LOCK).open("w")
        except FileNotFoundError:
            continue  # another process has just given it its final name
        with handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError as error:
                raise UserError(
                    f"another process is building {out}: wait for it, or choose another folder"
                ) from error
            if not _still(scratch / _LOCK, handle.fileno()):
                continue
            try:
                yield scratch
            finally:
                if out.exists() or not any(scratch.glob("*.tokens")):  # nothing to go on from
                    shutil.rmtree(scratch, ignore_errors=True)
            return


def _still(path: Path, handle: int) -> bool:
    """Whether a path is the file that is open here."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


class _Build:
    """One build, from the first document to the last shard."""

    def __init__(
        self,
        folder: Path,
        source: SourceConfig,
        name: str,
        chat: ChatEncoder,
        shard_tokens: int,
        workers: int,
        progress: Progress | None,
    ) -> None:
        self._folder, self._share, self._chat = folder, source.heldout, chat
        self._ends = source.heldout_from == "end"
        self._tokenizer, self._masked = chat.tokenizer, source.kind == "chat"
        self._shard_tokens, self._workers, self._progress = shard_tokens, workers, progress
        self._corpus = Corpus(source, name)
        self._listing = self._corpus.listing()
        self._journal = Journal(folder)

    def _described(self) -> dict[str, Any]:
        """What the manifest says of the source. No times: equal corpora give equal manifests."""
        source = self._corpus.source
        fields = ("kind", "path", "field", "split", "revision", "separator")
        known = {field: value for field in fields if (value := getattr(source, field)) is not None}
        if self._ends:
            known["heldout_from"] = "end"
        if self._masked:
            known["loss_on"] = list(source.loss_on)
            known["form"] = hashlib.sha256(self._chat.digest.encode()).hexdigest()[:32]
        sizes = [size for _, size, _ in self._listing]
        return {**known, "files": len(sizes), "size": sum(sizes)}

    def _key(self) -> dict[str, Any]:
        """All that the shards depend on; for the corpus, times stand for the content."""
        return {
            "format": FORMAT,
            "source": self._described(),
            "listing": hashlib.sha256(json.dumps(self._listing).encode()).hexdigest(),
            "tokenizer": self._tokenizer.digest,
            "heldout": self._share,
            "shard_tokens": self._shard_tokens,
        }

    def check_same(self, manifest: Manifest, out: Path) -> None:
        """Raises: UserError if a finished folder is of something else."""
        theirs: dict[str, Any] = {
            "source": dict(manifest.source),
            "tokenizer": manifest.tokenizer,
            "heldout": manifest.heldout,
            "shard_tokens": manifest.shard_tokens,
        }
        key = self._key()
        differ = [name for name, value in theirs.items() if key[name] != value]
        if differ:
            raise UserError(
                f"{out} holds shards of another build ({' and '.join(differ)} differ): delete it, "
                "or choose another folder"
            )

    def run(self, anew: bool) -> Manifest:
        """Writes what is missing, and describes all.

        Args:
            anew: Replace an unfinished build of other input instead of complaining.
        """
        key, header = self._key(), self._journal.header()
        differ = [] if header is None else [n for n in key if header.get(n) != key[n]]
        if differ and not anew:
            raise UserError(
                f"an unfinished build in {self._folder} is of other input "
                f"({' and '.join(differ)} differ): delete that folder to begin anew"
            )
        moved: int | None = None if header is None or differ else header["moved"]
        if header is None or differ:
            self._begin(key, moved)
        while True:
            shards, cursor = self._fill(moved)
            wanted = self._missing(shards, cursor)
            if wanted is None:
                break
            # By chance one side got nothing. Which document it should get is known only now.
            moved = wanted
            self._begin(key, moved)
        return Manifest(
            token_dtype(self._tokenizer.vocab_size).name,
            self._tokenizer.digest,
            self._tokenizer_file(),
            self._tokenizer.vocab_size,
            self._described(),
            self._share,
            self._shard_tokens,
            masked=self._masked,
            shards=shards,
        )

    def _begin(self, key: dict[str, Any], moved: int | None) -> None:
        self._journal.start({**key, "moved": moved})

    def _tokenizer_file(self) -> FileRecord:
        self._tokenizer.save(self._folder / TOKENIZER_FILE)
        return describe_file(self._folder / TOKENIZER_FILE)

    def _missing(self, shards: list[Shard], cursor: Cursor) -> int | None:
        """The text that has to change sides so that neither stays empty."""
        if not cursor.texts:
            raise self._corpus.empty()
        if self._share > 0 and cursor.texts >= 2:
            train, heldout = (any(side in shard.parts for shard in shards) for side in SIDES)
            if not heldout:
                return cursor.lowest[1]
            if not train:
                return cursor.highest[1]
        return None

    def _fill(self, moved: int | None) -> tuple[list[Shard], Cursor]:
        """Encodes from where the journal ends to the end of the corpus."""
        shards, cursor = self._journal.resume()
        parts = [part for shard in shards for part in shard.parts.values()]
        documents, tokens = sum(p.documents for p in parts), sum(p.tokens for p in parts)
        text = sum(shard.text_bytes for shard in shards)
        read = 0
        todo = units(self._corpus)
        for unit in islice(todo, cursor.unit):
            read += unit.nbytes
        if self._progress is not None:
            self._progress(Done(documents, tokens, text, read))
        first = [replace(unit, skip=cursor.skip) for unit in islice(todo, 1)]
        with ShardWriter(self._folder, self._shard_tokens, self._masked, len(shards)) as writer:

            def close() -> None:
                shard = writer.finish()
                if shard is not None:
                    shards.append(shard)
                    self._journal.add(shard, cursor)

            for encoded in encode_all(self._corpus, chain(first, todo), self._chat, self._workers):
                cursor.unit, cursor.skip = encoded.unit.index, encoded.unit.skip
                for text_hash, size, made in _grouped(encoded):
                    if writer.full(sum(len(ids) for ids, _ in made)):
                        close()
                    draw = heldout_draw(cursor.texts, text_hash)
                    held = is_heldout(cursor.texts, text_hash, self._share, self._ends)
                    held ^= cursor.texts == moved
                    for number, (ids, mask) in enumerate(made):
                        writer.add(SIDES[held], ids, 0 if number else size, mask)
                    text += size
                    cursor.lowest = min(cursor.lowest, (draw, cursor.texts))
                    cursor.highest = max(cursor.highest, (draw, cursor.texts))
                    cursor.skip += 1
                    cursor.texts += 1
                documents, tokens = documents + len(encoded.lengths), tokens + len(encoded.tokens)
                read += encoded.unit.nbytes
                if self._progress is not None:
                    self._progress(Done(documents, tokens, text, read))
            close()
        return shards, cursor


def _grouped(encoded: Encoded) -> Iterator[tuple[int, int, list[_Document]]]:
    """Hash, UTF-8 bytes, and the documents of each text or conversation: ids and masks."""
    lengths = iter(encoded.lengths.tolist())
    start = 0
    columns = (encoded.counts, encoded.hashes, encoded.sizes)
    for count, text_hash, size in zip(*(column.tolist() for column in columns), strict=True):
        made: list[_Document] = []
        for length in islice(lengths, count):
            part = slice(start, start + length)
            made.append(
                (encoded.tokens[part], None if encoded.mask is None else encoded.mask[part])
            )
            start += length
        yield text_hash, size, made
