"""Token shards: the one form in which tokenised documents lie on the disk, and how it is read.

A folder holds shards 0, 1, 2, ..., each a stretch of neighbouring documents of the corpus. For each
side (train, heldout) that has documents in it, a shard has raw little-endian arrays:

    train-00000.tokens    ids of its documents one after another, uint16 or uint32
    train-00000.offsets   where each document starts, and the end of the last one, int64
    train-00000.mask      1 where a token is to be learned, uint8; only in folders that have masks

`manifest.json` says what they are and describes every file, `tokenizer.json` is what made the ids.
Many shards behave as one array. Opening looks at the size of every file and into none; after that
exactly the pages are read that a slice lies in. docs/data.md says why it looks like this.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from openzaya.data.split import SIDES
from openzaya.data.tokenizer import TOKENIZER_FILE, Tokenizer
from openzaya.errors import UserError

FORMAT = 2  # raise it whenever the same inputs would give other files
MANIFEST = "manifest.json"
TOKEN_DTYPES = ("uint16", "uint32")
OPEN_FILES = 64  # of a column, at once; every one takes a file handle
_BLOCK = 1 << 20
_INDEX_DTYPE = np.dtype("<i8")
_MASK_DTYPE = np.dtype("u1")


@dataclass(frozen=True)
class FileRecord:
    """Size and digests of one file: the CRC-32 finds damage fast, the SHA-256 surely."""

    bytes: int
    sha256: str
    crc32: str


@dataclass(frozen=True)
class Part:
    """One side of one shard; `files` by the ending of their names."""

    documents: int
    tokens: int
    files: Mapping[str, FileRecord]


@dataclass(frozen=True)
class Shard:
    """A stretch of the corpus: its sides that have documents, and UTF-8 bytes of its texts."""

    parts: Mapping[str, Part]
    text_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of its files."""
        return sum(f.bytes for part in self.parts.values() for f in part.files.values())


@dataclass(frozen=True)
class Manifest:
    """What a folder of shards holds.

    Attributes:
        dtype: Of the tokens.
        tokenizer: Digest of the tokenizer that made them (`Tokenizer.digest`).
        tokenizer_file: Of the copy that lies beside them.
        vocab_size: Entries of that tokenizer.
        source: Where the documents came from, for people.
        heldout: Share of documents that were kept for evaluation.
        shard_tokens: What a shard holds at most, unless one document alone is longer.
        masked: Whether there is a mask.
        shards: In the order of the corpus.
    """

    dtype: str
    tokenizer: str
    tokenizer_file: FileRecord
    vocab_size: int
    source: Mapping[str, Any]
    heldout: float
    shard_tokens: int
    masked: bool
    shards: Sequence[Shard]

    @property
    def digest(self) -> str:
        """Changes with every token, border and side, but not with where the documents lay."""
        content = [FORMAT, self.dtype, self.tokenizer, *map(shard_to_json, self.shards)]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]

    def documents(self, side: str) -> int:
        """Documents of a side."""
        return sum(shard.parts[side].documents for shard in self.shards if side in shard.parts)

    def tokens(self, side: str) -> int:
        """Tokens of a side."""
        return sum(shard.parts[side].tokens for shard in self.shards if side in shard.parts)

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of all texts."""
        return sum(shard.text_bytes for shard in self.shards)

    def files(self) -> Iterator[tuple[str, FileRecord]]:
        """Name and record of every file beside the manifest."""
        yield TOKENIZER_FILE, self.tokenizer_file
        for number, shard in enumerate(self.shards):
            yield from shard_files(number, shard)

    def to_json(self) -> dict[str, Any]:
        """The content of manifest.json."""
        return {
            "format": FORMAT,
            "digest": self.digest,
            "dtype": self.dtype,
            "tokenizer": {
                "digest": self.tokenizer,
                "vocab_size": self.vocab_size,
                "file": vars(self.tokenizer_file),
            },
            "source": dict(self.source),
            "heldout": self.heldout,
            "shard_tokens": self.shard_tokens,
            "masked": self.masked,
            "shards": [shard_to_json(shard) for shard in self.shards],
        }


def file_name(side: str, number: int, column: str) -> str:
    """Name of one file of a shard."""
    return f"{side}-{number:05}.{column}"


def shard_files(number: int, shard: Shard) -> Iterator[tuple[str, FileRecord]]:
    """Name and record of every file of a shard."""
    for side, part in shard.parts.items():
        for column, known in part.files.items():
            yield file_name(side, number, column), known


def shard_to_json(shard: Shard) -> dict[str, Any]:
    """A shard's entry in the manifest."""
    parts = {
        side: {
            "documents": part.documents,
            "tokens": part.tokens,
            "files": {column: vars(known) for column, known in part.files.items()},
        }
        for side, part in shard.parts.items()
    }
    return {"text_bytes": shard.text_bytes, **parts}


def shard_from_json(entry: dict[str, Any]) -> Shard:
    """The inverse; KeyError, TypeError or ValueError for anything else."""
    parts = {}
    for side in SIDES:
        if side in entry:
            files = {column: FileRecord(**known) for column, known in entry[side]["files"].items()}
            parts[side] = Part(int(entry[side]["documents"]), int(entry[side]["tokens"]), files)
    return Shard(parts, int(entry["text_bytes"]))


class DamagedManifest(UserError):
    """A manifest that cannot be read, or whose content is not what its digest says."""


def read_manifest(folder: Path) -> Manifest:
    """Reads manifest.json and compares it with the digest in it.

    Raises:
        UserError: if it is missing or of another format; `DamagedManifest` if it is damaged.
    """
    file = folder / MANIFEST
    if not file.is_file():
        raise UserError(
            f"{folder} is no folder of token shards (it has no {MANIFEST}): make one with "
            "`openzaya data build`"
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        number = content["format"]
        if number != FORMAT:
            raise UserError(
                f"{file} is of format {number}, but this version reads format {FORMAT}: "
                "build the shards again"
            )
        maker = content["tokenizer"]
        manifest = Manifest(
            str(content["dtype"]),
            str(maker["digest"]),
            FileRecord(**maker["file"]),
            int(maker["vocab_size"]),
            dict(content["source"]),
            float(content["heldout"]),
            int(content["shard_tokens"]),
            bool(content["masked"]),
            [shard_from_json(entry) for entry in content["shards"]],
        )
        if manifest.dtype not in TOKEN_DTYPES or manifest.digest != content["digest"]:
            raise ValueError("its digest does not match its content")
    except (OSError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DamagedManifest(
            f"{file} is damaged ({error}): copy it again, or build the shards again"
        ) from error
    return manifest


class Stream:
    """A column of all shards as one array, [length], of which only slices are ever read.

    Slices and single elements work as on an ndarray; `numpy.asarray` reads everything.
    """

    def __init__(
        self,
        files: Sequence[Path],
        lengths: Sequence[int],
        dtype: np.dtype[Any],
        bases: Sequence[int] | None = None,
    ) -> None:
        """Opens nothing yet.

        Args:
            files: Of the shards that have the column.
            lengths: Elements to take of each file, at least one.
            dtype: Of the elements.
            bases: To be added to the elements of each file.
        """
        self._files, self.dtype = files, dtype
        self._firsts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self._bases = None if bases is None else np.array(bases, np.int64)
        self._map = lru_cache(OPEN_FILES)(self._open)

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step != 1:
                raise IndexError("only slices of step 1 can be read")
            return self._read(start, stop)
        index = range(len(self))[key]
        return self._read(index, index + 1)[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return self._read(0, len(self)).astype(dtype or self.dtype, copy=False)

    def place(self, value: int) -> int:
        """Index of the first element that is at least `value`, where elements ascend."""
        if not self._files or self._bases is None:
            return 0
        shard = max(0, int(np.searchsorted(self._bases, value, "right")) - 1)
        first, stop = self._firsts[shard : shard + 2]
        elements = self._map(shard)[1][: stop - first]
        return int(first + np.searchsorted(elements, value - self._bases[shard]))

    def _read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Elements start to stop - 1, copied."""
        parts = [np.zeros(0, self.dtype)]
        shard = int(np.searchsorted(self._firsts, start, "right")) - 1
        while start < stop:
            first, end = self._firsts[shard : shard + 2]
            part = self._copy(shard, int(start - first), int(min(stop, end) - first))
            parts.append(part if self._bases is None else part + self._bases[shard])
            start, shard = int(end), shard + 1
        return parts[1] if len(parts) == 2 else np.concatenate(parts)

    def _copy(self, shard: int, start: int, stop: int) -> npt.NDArray[Any]:
        content, elements = self._map(shard)
        size = self.dtype.itemsize
        low = start * size // mmap.PAGESIZE * mmap.PAGESIZE
        if stop * size - low > mmap.PAGESIZE:  # several pages: ask for all of them at once
            content.madvise(mmap.MADV_WILLNEED, low, stop * size - low)
        return elements[start:stop].copy()

    def _open(self, shard: int) -> tuple[mmap.mmap, npt.NDArray[Any]]:
        with self._files[shard].open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # Rows are asked for in random order: what lies around one is not wanted next.
        content.madvise(mmap.MADV_RANDOM)
        return content, np.frombuffer(content, self.dtype)


@dataclass(frozen=True)
class Side:
    """Documents of one side of a source.

    Attributes:
        tokens: Ids of all documents, [tokens], uint16 or uint32.
        offsets: Where documents start, and the end of the last one, int64 [documents + 1];
            empty if there are no documents.
        mask: 1 where a token is to be learned, uint8 [tokens]; None if all are.
    """

    tokens: Stream
    offsets: Stream
    mask: Stream | None = None

    def __len__(self) -> int:
        return max(len(self.offsets) - 1, 0)

    def document(self, index: int) -> npt.NDArray[Any]:
        """Ids of one document, [length], the eos at its end included."""
        start, stop = self.offsets[index : index + 2]
        ids: npt.NDArray[Any] = self.tokens[start:stop]
        return ids

    def document_mask(self, index: int) -> npt.NDArray[np.uint8] | None:
        """Mask of one document, [length]; None: everything is to be learned."""
        if self.mask is None:
            return None
        start, stop = self.offsets[index : index + 2]
        found: npt.NDArray[np.uint8] = self.mask[start:stop]
        return found

    def starts(self, first: int, stop: int) -> npt.NDArray[np.int64]:
        """Places in [first, stop) where documents start, ascending."""
        low, high = (min(self.offsets.place(value), len(self)) for value in (first, stop))
        found: npt.NDArray[np.int64] = self.offsets[low:high]
        return found


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


def open_shards(folder: Path, manifest: Manifest | None = None) -> TextStore:
    """Opens a folder of shards, in time that grows with their number and not with their size.

    Args:
        folder: Holds the shards.
        manifest: What `read_manifest` said, if it was asked before.

    Raises:
        UserError: if the manifest is damaged, or a file is missing or of the wrong size.
    """
    manifest = manifest or read_manifest(folder)
    for name, known in manifest.files():
        problem = _size_problem(folder / name, known)
        if problem:
            raise UserError(
                f"{folder} is not whole: {name} {problem}: copy it again, or build the shards again"
            )
    train, heldout = (open_side(folder, manifest, side) for side in SIDES)
    return TextStore(train, heldout, manifest.digest)


def open_side(folder: Path, manifest: Manifest, side: str) -> Side:
    """One side of a folder, whose files are taken to be there."""
    there = [
        (n, shard.parts[side]) for n, shard in enumerate(manifest.shards) if side in shard.parts
    ]

    def files(column: str) -> list[Path]:
        return [folder / file_name(side, number, column) for number, _ in there]

    tokens = [part.tokens for _, part in there]
    documents = [part.documents for _, part in there]
    if documents:
        documents[-1] += 1  # the end of the last document, which elsewhere is the next one's start
    bases = [0, *np.cumsum(tokens).tolist()[:-1]]
    return Side(
        Stream(files("tokens"), tokens, np.dtype(manifest.dtype)),
        Stream(files("offsets"), documents, _INDEX_DTYPE, bases),
        Stream(files("mask"), tokens, _MASK_DTYPE) if manifest.masked else None,
    )


def stored_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that made a folder's ids.

    Raises:
        UserError: if it cannot be read, or is not the one that the manifest names.
    """
    manifest = read_manifest(folder)
    tokenizer = Tokenizer.load(folder / TOKENIZER_FILE)
    if tokenizer.digest != manifest.tokenizer:
        raise UserError(
            f"{folder / TOKENIZER_FILE} is not the tokenizer that made these shards: copy it "
            "again, or build the shards again"
        )
    return tokenizer


def describe_file(path: Path) -> FileRecord:
    """Reads a file once and describes it."""
    sha, crc, size = hashlib.sha256(), 0, 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            sha.update(block)
            crc = zlib.crc32(block, crc)
            size += len(block)
    return FileRecord(size, sha.hexdigest(), f"{crc:08x}")


def verify(
    folder: Path,
    manifest: Manifest,
    quick: bool = False,
    progress: Callable[[int], None] | None = None,
) -> list[str]:
    """What is wrong with the files of a folder; nothing, if all is well.

    Args:
        folder: Holds shards.
        manifest: Of the folder.
        quick: Compare CRC-32 instead of SHA-256.
        progress: Called with the bytes of every file that was read.
    """
    problems = []
    for name, known in manifest.files():
        problem = _size_problem(folder / name, known) or damage(folder / name, known, quick)
        if problem:
            problems.append(f"{name} {problem}")
        if progress is not None:
            progress(known.bytes)
    return problems


def damage(path: Path, known: FileRecord, quick: bool) -> str | None:
    """What is wrong with a file's content."""
    try:
        if quick:
            return None if _crc32(path) == known.crc32 else "is damaged: its CRC-32 does not match"
        same = describe_file(path).sha256 == known.sha256
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None if same else "is damaged: its SHA-256 does not match"


def _crc32(path: Path) -> str:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return f"{crc:08x}"


def _size_problem(path: Path, known: FileRecord) -> str | None:
    try:
        size = path.stat().st_size
    except OSError:
        return "is missing"
    return None if size == known.bytes else f"has {size:,} bytes, not {known.bytes:,}"
