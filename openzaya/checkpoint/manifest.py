"""What a folder must hold: the size and SHA-256 of every file, and a CRC-32 of every tensor.

The digests of files say *that* something is damaged; the checksums of tensors say *what*, and are
fast enough to be compared whenever a tensor is read.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openzaya.checkpoint.headers import read_header
from openzaya.errors import UserError

MANIFEST = "manifest.json"
_BLOCK = 1 << 20


@dataclass(frozen=True)
class FileRecord:
    """One file of a manifest.

    Attributes:
        bytes: its size.
        sha256: of its content, in hex.
        tensors: CRC-32 of each tensor's data, for safetensors files.
    """

    bytes: int
    sha256: str
    tensors: dict[str, int] | None = None

    def to_json(self) -> dict[str, Any]:
        """The manifest's entry."""
        entry: dict[str, Any] = {"bytes": self.bytes, "sha256": self.sha256}
        if self.tensors is not None:
            entry["tensors"] = {name: f"{crc:08x}" for name, crc in self.tensors.items()}
        return entry


def record(file: Path) -> FileRecord:
    """Read a file once and describe it.

    Raises:
        UserError: if it is a damaged safetensors file.
    """
    digest = hashlib.sha256()
    tensors: dict[str, int] | None = None
    with file.open("rb") as handle:
        if file.suffix == ".safetensors":
            header = read_header(file)
            digest.update(handle.read(header.start))
            tensors = {}
            for name, span in header.spans.items():
                left, crc = span.nbytes, 0
                while left and (block := handle.read(min(_BLOCK, left))):
                    digest.update(block)
                    crc = zlib.crc32(block, crc)
                    left -= len(block)
                tensors[name] = crc
        while block := handle.read(_BLOCK):
            digest.update(block)
        return FileRecord(handle.tell(), digest.hexdigest(), tensors)


def write_manifest(folder: Path, known: Mapping[str, FileRecord] | None = None) -> None:
    """Describe all files of a folder in its manifest.

    Args:
        known: records that were made while files were written, or before they are, by name.
    """
    known = known or {}
    there = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
    files = {
        name: (known.get(name) or record(folder / name)).to_json()
        for name in sorted({*there, *known} - {MANIFEST})
    }
    (folder / MANIFEST).write_text(json.dumps({"files": files}, indent=1) + "\n")


def read_manifest(folder: Path) -> dict[str, FileRecord] | None:
    """The folder's manifest, or None if it has none.

    Raises:
        UserError: if it cannot be read.
    """
    file = folder / MANIFEST
    try:
        entries = json.loads(file.read_text())["files"]
        return {
            name: FileRecord(
                int(entry["bytes"]), str(entry["sha256"]), _checksums(entry.get("tensors"))
            )
            for name, entry in entries.items()
        }
    except FileNotFoundError:
        return None
    except (
        AttributeError,
        KeyError,
        OSError,
        OverflowError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise UserError(f"{file} cannot be read ({error}).") from error


def _checksums(entry: dict[str, str] | None) -> dict[str, int] | None:
    return None if entry is None else {name: int(crc, 16) for name, crc in entry.items()}


def is_file(file: Path) -> bool:
    """Whether there is such a file; False too for names that no file system takes."""
    try:
        return file.is_file()
    except (OSError, ValueError):
        return False


def verify(folder: Path, tensors: bool = True) -> list[str]:
    """Compare a folder with its manifest; the list of what is wrong is empty if all is well.

    Args:
        tensors: False leaves files out whose tensors have checksums of their own, which whoever
            reads them next compares (`weights.py`); their size is compared all the same.
    """
    try:
        files = read_manifest(folder)
    except UserError as error:
        return [str(error)]
    if files is None:
        return [f"{MANIFEST} is missing"]
    problems = []
    for name, expected in files.items():
        file = folder / name
        if not is_file(file):
            problems.append(f"{name} is missing")
        elif file.stat().st_size != expected.bytes:
            problems.append(f"{name} has {file.stat().st_size} bytes, not {expected.bytes}")
        elif tensors or expected.tensors is None:
            problems += _compare(file, name, expected)
    return problems


def _compare(file: Path, name: str, expected: FileRecord) -> list[str]:
    try:
        found = record(file)
    except UserError as error:
        return [str(error)]
    if found.sha256 == expected.sha256:
        return []
    ours, theirs = found.tensors or {}, expected.tensors or {}
    changed = [tensor for tensor, crc in theirs.items() if ours.get(tensor) != crc]
    where = f" (tensor {changed[0]}{' and others' if changed[1:] else ''})" if changed else ""
    return [f"{name} is damaged: its SHA-256 does not match the manifest{where}"]
