"""Documents of a text source, always in the same order.

`documents` yields the texts (and `conversations` the turns of a chat source), `fingerprint` names
their content so that a cache can tell when it changed. Documents of nothing but white space are
left out.
"""

from __future__ import annotations

import glob
import hashlib
import json
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from openzaya.config.recipe import SourceConfig
from openzaya.data.conversations import Conversation, parse_conversation
from openzaya.errors import UserError

CORPUS = Path(__file__).parent / "corpus"
GROUP_CHARACTERS = 2_000
_SUFFIXES: dict[str, tuple[str, ...]] = {
    "text": ("",),
    "jsonl": (".jsonl",),
    "parquet": (".parquet",),
    "chat": (".jsonl", ".parquet"),
}
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


def documents(source: SourceConfig, name: str) -> Iterator[str]:
    """The documents of a source, read while they are asked for.

    Args:
        source: Any kind but `tasks`.
        name: The source's name in the recipe, for messages.

    Raises:
        UserError: if files are missing, unreadable or malformed, or hold no document at all.
    """
    empty = True
    for document in _READERS[source.kind](source, name):
        if document and not document.isspace():
            empty = False
            yield document
    if empty:
        raise UserError(
            f"source {name!r} (kind {source.kind}, path {source.path!r}) holds no text: "
            "check its path, or the column that `field` names"
        )


def conversations(source: SourceConfig, name: str) -> Iterator[Conversation]:
    """The conversations of a source of kind chat; those in which nothing is said are left out.

    Raises:
        UserError: as `documents`, or if a row holds no conversation.
    """
    for path in _files(source, name):
        if path.suffix == ".parquet":
            rows, sparse = _parquet_rows(path, name, ("messages", "tools")), True
        else:
            rows, sparse = _jsonl_rows(path, name), False
        for where, row in rows:
            conversation = parse_conversation(row, where, sparse)
            if not conversation.text.isspace() and conversation.text:
                yield conversation


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


def _read_text(path: Path, name: str) -> str:
    try:
        return path.read_bytes().decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UserError(
            f"source {name!r}: {path} is not UTF-8 text at byte {error.start} ({error.reason}): "
            "convert the file, or take it out of the path"
        ) from error


def _text(source: SourceConfig, name: str) -> Iterator[str]:
    for path in _files(source, name):
        text = _read_text(path, name)
        yield from text.split(source.separator) if source.separator else [text]


def _bundled(source: SourceConfig, name: str) -> Iterator[str]:
    text = _read_text(_files(source, name)[0], name)
    if source.separator:
        yield from text.split(source.separator)
    else:
        yield from group(text.split("\n\n"), GROUP_CHARACTERS)


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


def _value(row: dict[str, Any], source: SourceConfig, where: str) -> str:
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


def _jsonl(source: SourceConfig, name: str) -> Iterator[str]:
    for path in _files(source, name):
        for where, row in _jsonl_rows(path, name):
            yield _value(row, source, where)


def _jsonl_rows(path: Path, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a file, each with its place."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"source {name!r}: {path}:{number}"
            try:
                row = json.loads(line)
            except ValueError as error:  # malformed JSON, or bytes that are not UTF-8
                raise UserError(
                    f"{where}: not JSON ({error}): every line must be one object"
                ) from error
            if not isinstance(row, dict):
                raise UserError(f"{where}: every line must be an object, {{...}}")
            yield where, row


def _parquet(source: SourceConfig, name: str) -> Iterator[str]:
    for path in _files(source, name):
        for _, row in _parquet_rows(path, name, (source.field,)):
            yield _value(row, source, f"source {name!r}: {path}")


def _parquet_rows(
    path: Path, name: str, wanted: tuple[str, ...]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a file, each with its place; the first of the wanted columns must be there."""
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise UserError(
            f"source {name!r} is parquet, which needs pyarrow: pip install 'openzaya[parquet]'"
        ) from error
    where = f"source {name!r}: {path}"
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            there = [column for column in wanted if column in columns]
            if wanted[0] not in there:
                hint = "set `field` to the one that holds the text"
                raise UserError(
                    f"{where}: no column {wanted[0]!r}; there are {', '.join(columns)}: "
                    + ("call the one with the turns so" if wanted[0] == "messages" else hint)
                )
            number = 0
            for batch in file.iter_batches(batch_size=1024, columns=there):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{where}:{number}", row
    except pyarrow.ArrowException as error:
        raise UserError(f"{where}: not a readable parquet file ({error})") from error


def _chat(source: SourceConfig, name: str) -> Iterator[str]:
    for conversation in conversations(source, name):
        yield conversation.text


def _hub(source: SourceConfig, name: str) -> Iterator[str]:
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"source {name!r} is a hub data set, which needs `datasets`: "
            "pip install 'openzaya[hub]'"
        ) from error
    where = f"source {name!r}: hub data set {source.path!r}, split {source.split!r}"
    try:
        rows = datasets.load_dataset(source.path, split=source.split, revision=source.revision)
    except Exception as error:  # the library raises a dozen unrelated types
        raise UserError(
            f"{where}, revision {source.revision!r} could not be loaded "
            f"({type(error).__name__}: {error}): check the names and the network"
        ) from error
    for row in rows:
        yield _value(row, source, where)


def _stdlib(source: SourceConfig, name: str) -> Iterator[str]:
    """The standard library's own modules, then the texts of Python's help()."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [p for p in root.rglob("*.py") if not _NOT_LIBRARY & set(p.relative_to(root).parts)]
    for path in sorted(files, key=lambda p: p.relative_to(root).as_posix()):
        with tokenize.open(path) as file:  # honours the encoding that a module declares
            yield file.read()
    from pydoc_data.topics import topics

    for topic in sorted(topics):
        yield topics[topic]


_READERS = {
    "text": _text,
    "jsonl": _jsonl,
    "parquet": _parquet,
    "hub": _hub,
    "bundled": _bundled,
    "stdlib": _stdlib,
    "chat": _chat,
}
