"""Shards while they are written: digests on the way, and a journal of those that are complete.

A shard counts once its line stands in the journal, which is written after its files are on the
disk. Whatever else lies in the folder is of a shard that was not finished, and goes.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from array import array
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from openzaya.data.shards import (
    FileRecord,
    Part,
    Shard,
    damage,
    file_name,
    shard_files,
    shard_from_json,
    shard_to_json,
)
from openzaya.data.split import SIDES

JOURNAL = "journal.jsonl"
_BUFFER = 1 << 20


class _File:
    """A file that is hashed while it is written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb", buffering=_BUFFER)
        self._sha, self._crc, self._size = hashlib.sha256(), 0, 0

    def write(self, data: npt.NDArray[Any] | array[int]) -> None:
        """Appends the elements of an array."""
        content = data.tobytes()
        self._sha.update(content)
        self._crc = zlib.crc32(content, self._crc)
        self._size += len(content)
        self._file.write(content)

    def finish(self) -> FileRecord:
        """Brings everything to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return FileRecord(self._size, self._sha.hexdigest(), f"{self._crc:08x}")

    def discard(self) -> None:
        """Gives up."""
        with suppress(OSError):  # a full disk: what is in the buffer is not wanted anyway
            self._file.close()
        self._path.unlink(missing_ok=True)


class _PartWriter:
    """One side of the shard that is being written."""

    def __init__(self, folder: Path, side: str, number: int, masked: bool) -> None:
        columns = ("tokens", "mask") if masked else ("tokens",)
        self._files = {c: _File(folder / file_name(side, number, c)) for c in columns}
        self._offsets = array("q", [0])
        self._offsets_path = folder / file_name(side, number, "offsets")

    def add(self, ids: npt.NDArray[Any], mask: npt.NDArray[np.uint8] | None) -> None:
        self._files["tokens"].write(ids)
        if mask is not None:
            self._files["mask"].write(mask)
        self._offsets.append(self._offsets[-1] + len(ids))

    def finish(self) -> Part:
        self._files["offsets"] = _File(self._offsets_path)
        self._files["offsets"].write(self._offsets)
        records = {column: file.finish() for column, file in sorted(self._files.items())}
        return Part(len(self._offsets) - 1, self._offsets[-1], records)

    def discard(self) -> None:
        for file in self._files.values():
            file.discard()


class ShardWriter:
    """Writes documents into shards of a folder, one shard after another.

    Leaving its `with` block removes the files of a shard that was not finished.
    """

    def __init__(self, folder: Path, shard_tokens: int, masked: bool, number: int = 0) -> None:
        """Args: `number` is that of the first shard; `masked` asks for a mask of every document."""
        self._folder, self._shard_tokens, self._masked = folder, shard_tokens, masked
        self.number = number
        self._parts: dict[str, _PartWriter] = {}
        self._tokens = self._text_bytes = 0

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for part in self._parts.values():
            part.discard()

    def full(self, length: int) -> bool:
        """Whether a document of this many tokens belongs into the next shard."""
        return self._tokens > 0 and self._tokens + length > self._shard_tokens

    def add(
        self,
        side: str,
        ids: npt.NDArray[Any],
        text_bytes: int,
        mask: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        """Appends a document to the current shard.

        Args:
            side: The one that it belongs to.
            ids: [length].
            text_bytes: What its text has in UTF-8.
            mask: 1 where a token is to be learned, [length].
        """
        if (mask is not None) != self._masked or (mask is not None and len(mask) != len(ids)):
            raise ValueError("a mask belongs to every document of masked shards, and to no other")
        if side not in self._parts:
            self._parts[side] = _PartWriter(self._folder, side, self.number, self._masked)
        self._parts[side].add(ids, mask)
        self._tokens += len(ids)
        self._text_bytes += text_bytes

    def finish(self) -> Shard | None:
        """Ends the current shard; None if there is nothing in it."""
        if not self._parts:
            return None
        parts = {side: self._parts[side].finish() for side in SIDES if side in self._parts}
        shard = Shard(parts, self._text_bytes)
        self._parts, self._tokens, self._text_bytes = {}, 0, 0
        self.number += 1
        return shard


@dataclass
class Cursor:
    """How far a corpus has been read, and what has to be known to go on from there.

    Attributes:
        unit: Unit to read next.
        skip: Texts or conversations of it that are done.
        texts: Those done in all.
        lowest: Smallest number drawn (`split.heldout_draw`) and the text that drew it.
        highest: Largest one.
    """

    unit: int = 0
    skip: int = 0
    texts: int = 0
    lowest: tuple[int, int] = (1 << 64, -1)
    highest: tuple[int, int] = (-1, -1)


class Journal:
    """The shards that are complete, and where the corpus goes on behind them."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / JOURNAL

    def start(self, header: dict[str, Any]) -> None:
        """Begins anew: removes all other files but hidden ones."""
        for file in self._folder.iterdir():
            if not file.name.startswith("."):
                file.unlink()
        self._append(header, "w")

    def header(self) -> dict[str, Any] | None:
        """What `start` was given; None if there is nothing to go on from."""
        lines = self._lines()
        return dict(lines[0]) if lines else None

    def add(self, shard: Shard, cursor: Cursor) -> None:
        """Notes a shard whose files are on the disk."""
        sync(self._folder)
        self._append({"shard": shard_to_json(shard), "cursor": vars(cursor)}, "a")

    def resume(self) -> tuple[list[Shard], Cursor]:
        """Complete shards whose files are as they should be; everything behind them is removed."""
        shards: list[Shard] = []
        cursor = Cursor()
        lines = self._lines()
        wanted = {JOURNAL}
        for line in lines[1:]:
            shard = shard_from_json(line["shard"])
            files = list(shard_files(len(shards), shard))
            if any(_broken(self._folder / name, known) for name, known in files):
                break
            wanted |= {name for name, _ in files}
            shards.append(shard)
            fields = line["cursor"]
            extremes = {name: tuple(fields[name]) for name in ("lowest", "highest")}
            cursor = Cursor(**{**fields, **extremes})
        for file in self._folder.iterdir():
            if file.name not in wanted and not file.name.startswith("."):
                file.unlink()
        content = "".join(json.dumps(line) + "\n" for line in lines[: len(shards) + 1])
        temporary = self._folder / f"{JOURNAL}.new"
        temporary.write_text(content)
        sync(temporary)
        os.replace(temporary, self._path)
        return shards, cursor

    def _append(self, entry: dict[str, Any], mode: str) -> None:
        with self._path.open(mode) as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _lines(self) -> list[dict[str, Any]]:
        """Whole lines; the last one may be torn."""
        try:
            text = self._path.read_text()
        except OSError:
            return []
        found = []
        for line in text.splitlines(keepends=True):
            try:
                entry = json.loads(line)
            except ValueError:
                break
            if not line.endswith("\n"):
                break
            found.append(entry)
        return found


def _broken(path: Path, known: FileRecord) -> bool:
    return not path.is_file() or damage(path, known, quick=True) is not None


def sync(path: Path) -> None:
    """Waits until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
