"""Documents of a text source, always in the same order.

A `Corpus` cuts a source into pieces that can be read one without the other, so that several
processes can share the work and a stopped one can go on in the middle. `documents` yields all
texts (of a chat source: what is said), `fingerprint` names their content so that a cache can tell
when it changed. Documents of nothing but white space are left out.
"""

from __future__ import annotations

import glob
import hashlib
import json
import mmap
import os
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from openzaya.config.recipe import SourceConfig
from openzaya.data.conversations import Conversation, parse_conversation
from openzaya.errors import UserError

CORPUS = Path(__file__).parent / "corpus"
GROUP_CHARACTERS = 2_000
PIECE_BYTES = 4 << 20  # files that can be cut are cut into pieces of about this size
HUB_ROWS = 4096  # rows of a hub data set that make a piece
_SUFFIXES: dict[str, tuple[str, ...]] = {
    "text": ("",),
    "jsonl": (".jsonl",),
    "parquet": (".parquet",),
    "chat": (".jsonl", ".parquet"),
}
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
_TOPICS = "pydoc_data.topics"


@dataclass(frozen=True)
class Piece:
    """A stretch of a source that can be read by itself.

    Attributes:
        path: Its file; empty for hub data sets.
        start: First byte of a text or jsonl file, row group of a parquet file, or hub row.
        stop: The one after the last.
        nbytes: How much there is to read, for progress: exact for text, else about.
    """

    path: str
    start: int
    stop: int
    nbytes: int


class Corpus:
    """A source as pieces, and the documents of each."""

    def __init__(self, source: SourceConfig, name: str) -> None:
        """Looks for the files, but reads none of them.

        Args:
            source: Any kind that holds texts: neither `tasks` nor `shards`.
            name: The source's name in the recipe, for messages.

        Raises:
            UserError: if there are no files.
        """
        self.source, self.name = source, name
        self.files = [] if source.kind == "hub" else _files(source, name)

    def check(self) -> None:
        """Raises: UserError if a file cannot be read."""
        for path in self.files:
            if not os.access(path, os.R_OK):
                raise UserError(
                    f"source {self.name!r}: {path} cannot be read: change its permissions, or "
                    "take it out of the path"
                )

    def listing(self) -> list[tuple[str, int, int]]:
        """(name, bytes, modification time in ns) of every file; of hub data, (name, rows, 0)."""
        if self.source.kind == "hub":
            return [(f"{self.source.path}@{self.source.revision}", len(self._rows), 0)]
        known = [(path, path.stat()) for path in self.files]
        return [(path.as_posix(), stat.st_size, stat.st_mtime_ns) for path, stat in known]

    def pieces(self) -> Iterator[Piece]:
        """All pieces in order, found while they are asked for: cutting text at its separator
        reads it, everything else looks at few bytes.

        Raises:
            UserError: if a file cannot be read, or has no column `field`.
        """
        separator = self.source.separator
        for path in self.files:
            kind, size = self._form(path), path.stat().st_size
            if kind == "parquet":
                yield from self._parquet_pieces(path)
            elif kind == "jsonl":
                yield from _line_pieces(path, size)
            elif kind == "text" and separator and size:
                yield from _text_pieces(path, size, separator.encode("utf-8", "surrogatepass"))
            else:
                yield Piece(str(path), 0, size, size)
        if self.source.kind == "stdlib":
            yield Piece(_TOPICS, 0, 1, sum(map(len, _topics())))
        if self.source.kind == "hub":
            width = sum(map(len, islice(self._hub(0, len(self._rows)), 100)))
            width //= max(1, min(100, len(self._rows)))
            for start in range(0, len(self._rows), HUB_ROWS):
                stop = min(start + HUB_ROWS, len(self._rows))
                yield Piece("", start, stop, width * (stop - start))

    def nbytes(self) -> int:
        """The sum of all pieces' `nbytes`, for which little is read."""
        forms = {self._form(path) for path in self.files} | {self.source.kind}
        if forms & {"parquet", "hub", "stdlib"}:
            return sum(piece.nbytes for piece in self.pieces())
        return sum(path.stat().st_size for path in self.files)

    def read(self, piece: Piece) -> Iterator[str]:
        """The documents of one piece; of conversations, all that is said.

        Raises:
            UserError: if it is malformed, naming file and line (or byte, or row).
        """
        kind, path = self.source.kind, Path(piece.path)
        found: Iterator[str]
        if kind == "chat":
            found = (conversation.text for conversation in self.conversations(piece))
        elif kind == "hub":
            found = self._hub(piece.start, piece.stop)
        elif kind in ("jsonl", "parquet"):
            rows = self._rows_of(path, piece.start, piece.stop)
            found = (_value(row, self.source, where) for where, row in rows)
        elif kind == "stdlib":
            found = iter(_topics() if piece.path == _TOPICS else [_module(path)])
        else:
            found = self._text(path, piece.start, piece.stop)
        return (text for text in found if text and not text.isspace())

    def conversations(self, piece: Piece) -> Iterator[Conversation]:
        """Those of one piece of a chat source, without such in which nothing is said.

        Raises:
            UserError: if a row holds no conversation, naming it.
        """
        return (conversation for _, conversation in self.chat_rows(piece))

    def chat_rows(self, piece: Piece) -> Iterator[tuple[dict[str, Any], Conversation]]:
        """As `conversations`, each behind the row it was read from.

        Rows of JSON come with all that they hold, those of parquet with what is read of them.
        """
        path = Path(piece.path)
        sparse = self._form(path) == "parquet"
        for where, row in self._rows_of(path, piece.start, piece.stop):
            conversation = parse_conversation(row, where, sparse)
            if not conversation.text.isspace() and conversation.text:
                yield row, conversation

    def empty(self) -> UserError:
        """What to raise when no piece held a document."""
        what, field = "text", ", or the column that `field` names"
        if self.source.kind == "chat":
            what, field = "conversation", ""
        return UserError(
            f"source {self.name!r} (kind {self.source.kind}, path {self.source.path!r}) holds no "
            f"{what}: check its path{field}"
        )

    def _form(self, path: Path) -> str:
        """What a file is."""
        if self.source.kind == "chat":
            return "parquet" if path.suffix == ".parquet" else "jsonl"
        return self.source.kind

    @property
    def _columns(self) -> tuple[str, ...]:
        """The columns that are read; the first one must be there."""
        return ("messages", "tools") if self.source.kind == "chat" else (self.source.field,)

    def _text(self, path: Path, start: int, stop: int) -> Iterator[str]:
        text = _decode(path, start, stop, self.name)
        if self.source.heldout_from == "end":
            border = int(len(text) * (1 - self.source.heldout))
            parts = (text[:border], text[border:])
            if not all(part.strip() for part in parts):
                raise UserError(
                    f"source {self.name!r}: {path} is too short to hold out its end: take it out, "
                    'or set heldout_from = "documents"'
                )
            yield from parts
        elif self.source.separator:
            yield from text.split(self.source.separator)
        elif self.source.kind == "bundled":
            yield from group(text.split("\n\n"), GROUP_CHARACTERS)
        else:
            yield text

    def _rows_of(
        self, path: Path, start: int, stop: int
    ) -> Iterator[tuple[object, dict[str, Any]]]:
        """The rows of a stretch of a file, each with its place."""
        if self._form(path) == "parquet":
            yield from self._parquet_rows(path, start, stop)
            return
        with path.open("rb") as file:
            file.seek(start)
            at = start
            while at < stop and (line := file.readline()):
                if line.strip():
                    where = _Line(self.name, path, at)
                    try:
                        row = json.loads(line)
                    except ValueError as error:  # malformed JSON, or bytes that are not UTF-8
                        raise UserError(
                            f"{where}: not JSON ({error}): every line must be one object"
                        ) from error
                    if not isinstance(row, dict):
                        raise UserError(f"{where}: every line must be an object, {{...}}")
                    yield where, row
                at += len(line)

    def _parquet_pieces(self, path: Path) -> Iterator[Piece]:
        with self._parquet_file(path) as file:
            column = file.schema_arrow.names.index(self._columns[0])
            for number in range(file.metadata.num_row_groups):
                rows = file.metadata.row_group(number)
                nested = rows.num_columns != len(file.schema_arrow.names)  # not one leaf a column
                size = rows if nested else rows.column(column)
                nbytes = size.total_byte_size if nested else size.total_uncompressed_size
                yield Piece(str(path), number, number + 1, nbytes)

    def _parquet_rows(
        self, path: Path, start: int, stop: int
    ) -> Iterator[tuple[object, dict[str, Any]]]:
        """The rows of some row groups, each with its place."""
        import pyarrow

        with self._parquet_file(path) as file:
            columns = [c for c in self._columns if c in file.schema_arrow.names]
            groups = list(range(start, stop))
            row = sum(file.metadata.row_group(number).num_rows for number in range(start))
            try:
                batches = file.iter_batches(batch_size=1024, row_groups=groups, columns=columns)
                for batch in batches:
                    for values in batch.to_pylist():
                        yield f"source {self.name!r}: {path}, row {row}", values
                        row += 1
            except (pyarrow.ArrowException, OSError) as error:
                raise self._unreadable(path, error) from error

    def _parquet_file(self, path: Path) -> Any:
        try:
            import pyarrow
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise UserError(
                f"source {self.name!r} is parquet, which needs pyarrow: "
                "pip install 'openzaya[parquet]'"
            ) from error
        try:
            file = parquet.ParquetFile(path)
        except (pyarrow.ArrowException, OSError) as error:
            raise self._unreadable(path, error) from error
        columns = file.schema_arrow.names
        where = f"source {self.name!r}: {path}"
        if self._columns[0] not in columns:
            if self.source.kind == "chat":
                raise UserError(
                    f"{where}: no column 'messages'; there are {', '.join(columns)}: call the one "
                    "with the turns so"
                )
            _value(dict.fromkeys(columns), self.source, where)
        return file

    def _unreadable(self, path: Path, error: Exception) -> UserError:
        return UserError(f"source {self.name!r}: {path}: not a readable parquet file ({error})")

    @cached_property
    def _rows(self) -> Any:
        """The rows of a hub data set."""
        source = self.source
        try:
            import datasets
        except ImportError as error:
            raise UserError(
                f"source {self.name!r} is a hub data set, which needs `datasets`: "
                "pip install 'openzaya[hub]'"
            ) from error
        try:
            return datasets.load_dataset(source.path, split=source.split, revision=source.revision)
        except Exception as error:  # the library raises a dozen unrelated types
            raise UserError(
                f"{self._hub_name}, revision {source.revision!r} could not be loaded "
                f"({type(error).__name__}: {error}): check the names and the network"
            ) from error

    @property
    def _hub_name(self) -> str:
        return (
            f"source {self.name!r}: hub data set {self.source.path!r}, split {self.source.split!r}"
        )

    def _hub(self, start: int, stop: int) -> Iterator[str]:
        for number in range(start, stop):
            yield _value(self._rows[number], self.source, f"{self._hub_name}, row {number}")


@dataclass(frozen=True)
class _Line:
    """Where a byte of a file is; lines are counted only when there is something to complain of."""

    source: str
    path: Path
    at: int

    def __str__(self) -> str:
        number, left = 1, self.at
        with self.path.open("rb") as file:
            while left and (block := file.read(min(left, 1 << 20))):
                number += block.count(b"\n")
                left -= len(block)
        return f"source {self.source!r}: {self.path}:{number}"


def documents(source: SourceConfig, name: str) -> Iterator[str]:
    """The documents of a source, read while they are asked for.

    Args:
        source: Any kind that holds texts: neither `tasks` nor `shards`.
        name: The source's name in the recipe, for messages.

    Raises:
        UserError: if files are missing, unreadable or malformed, or hold no document at all.
    """
    corpus = Corpus(source, name)
    empty = True
    for piece in corpus.pieces():
        for document in corpus.read(piece):
            empty = False
            yield document
    if empty:
        raise corpus.empty()


def fingerprint(source: SourceConfig, name: str) -> str:
    """A digest of the source's content: of its files' bytes, or of its documents."""
    digest = hashlib.blake2b(digest_size=16)
    if source.kind in _SUFFIXES or source.kind == "bundled":
        for path in _files(source, name):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
    elif source.kind == "hub" and source.revision:
        digest.update(json.dumps([source.path, source.revision]).encode())
    else:
        for document in documents(source, name):
            digest.update(document.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


def _files(source: SourceConfig, name: str) -> list[Path]:
    """Files of a path that is a file, a folder (read recursively) or a glob, sorted."""
    if source.kind == "stdlib":
        return _library()
    if source.path is None:
        raise UserError(f"source {name!r} of kind {source.kind} needs a `path`")
    if source.kind == "bundled":
        return [_bundled_file(source.path, name)]
    path = Path(source.path).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        suffixes = _SUFFIXES[source.kind]
        inside = [p for p in path.rglob("*") if p.is_file() and p.name.endswith(suffixes)]
        found = [p for p in inside if not any(s.startswith(".") for s in p.relative_to(path).parts)]
    else:
        found = [Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file()]
    if not found:
        raise UserError(
            f"source {name!r}: no {source.kind} file at {source.path!r} (looked in "
            f"{Path.cwd()} for relative paths): give an existing file, folder or glob as `path`"
        )
    return sorted(found, key=lambda p: p.as_posix())


def _bundled_file(file_name: str, name: str) -> Path:
    there = sorted(p.name for p in CORPUS.glob("*.txt"))
    if file_name not in there:
        raise UserError(
            f"source {name!r}: no bundled text {file_name!r}; there is {', '.join(there)}"
        )
    return CORPUS / file_name


def _decode(path: Path, start: int, stop: int, name: str) -> str:
    """Bytes start to stop - 1 of a file as text, without a byte-order mark."""
    with path.open("rb") as file:
        file.seek(start)
        content = file.read(stop - start)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"source {name!r}: {path} is not UTF-8 text at byte {start + error.start} "
            f"({error.reason}): convert the file, or take it out of the path"
        ) from error
    return text if start else text.removeprefix("\ufeff")


def _text_pieces(path: Path, size: int, separator: bytes) -> Iterator[Piece]:
    """Stretches between separators, cut where splitting the whole text would cut."""
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        start = at = 0
        # Every separator is looked at: where "\n\n" cuts a run of line ends depends on the first.
        while (found := content.find(separator, at)) >= 0:
            at = found + len(separator)
            if found - start >= PIECE_BYTES:
                yield Piece(str(path), start, found, at - start)
                start = at
    yield Piece(str(path), start, size, size - start)


def _line_pieces(path: Path, size: int) -> Iterator[Piece]:
    """Stretches of whole lines."""
    with path.open("rb") as file:
        start = 0
        while start < size:
            file.seek(start + PIECE_BYTES)
            file.readline()
            stop = min(file.tell(), size)
            yield Piece(str(path), start, stop, stop - start)
            start = stop


def group(parts: Iterable[str], characters: int) -> Iterator[str]:
    """Joins neighbouring parts with blank lines, up to about `characters` in one document."""
    held: list[str] = []
    size = 0
    for part in parts:
        if held and size + len(part) > characters:
            yield "\n\n".join(held)
            held, size = [], 0
        held.append(part)
        size += len(part) + 2
    if held:
        yield "\n\n".join(held)


def _value(row: dict[str, Any], source: SourceConfig, where: object) -> str:
    """The text of one row; a null counts as an empty document."""
    if source.field not in row:
        raise UserError(
            f"{where}: no column {source.field!r}; there are {', '.join(map(str, row))}: set "
            "`field` to the one that holds the text"
        )
    value = row[source.field]
    if not isinstance(value, str | None):
        raise UserError(
            f"{where}: column {source.field!r} holds {type(value).__name__}, not text: set "
            "`field` to a column of text"
        )
    return value or ""


def _library() -> list[Path]:
    """The standard library's own modules."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [p for p in root.rglob("*.py") if not _NOT_LIBRARY & set(p.relative_to(root).parts)]
    return sorted(files, key=lambda p: p.relative_to(root).as_posix())


def _module(path: Path) -> str:
    with tokenize.open(path) as file:  # honours the encoding that a module declares
        return file.read()


def _topics() -> list[str]:
    """The texts of Python's help()."""
    from pydoc_data.topics import topics

    return [topics[topic] for topic in sorted(topics)]
