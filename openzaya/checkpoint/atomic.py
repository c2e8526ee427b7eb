"""Files and folders that appear whole or not at all.

A folder is written under a hidden name, every file is synced to disk, a manifest with SHA-256
digests is added, and one rename makes it visible. Whatever is interrupted leaves only the hidden
folder, which the next writer removes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from openzaya.errors import UserError

MANIFEST = "manifest.json"
_BLOCK = 1 << 20
_FOREIGN_SIGNS = ("os error", "iostream error", "inline_container", "file write failed")


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a scratch folder that becomes `path` when the block ends without an error.

    An existing `path` is replaced. On any error, or a signal that raises, nothing of the new
    content stays.

    Raises:
        UserError: if the disk is full or cannot be written.
    """
    scratch = path.with_name(f".{path.name}.incomplete")
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        yield scratch
        _write_manifest(scratch)
        for file in (*scratch.rglob("*"), scratch):
            _sync(file)
        if path.exists():
            old = path.with_name(f".{path.name}.old")
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
            try:
                scratch.rename(path)
            except BaseException:
                old.rename(path)
                raise
            shutil.rmtree(old, ignore_errors=True)
        else:
            scratch.rename(path)
        _sync(path.parent)
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise UserError(_explain(error, path)) from error
    except BaseException as error:
        shutil.rmtree(scratch, ignore_errors=True)
        # Writers of foreign libraries wrap the system's error in one of their own.
        if any(sign in str(error).lower() for sign in _FOREIGN_SIGNS):
            raise UserError(_explain(error, path)) from error
        raise


def write_text(path: Path, text: str) -> None:
    """Replace `path` by a file that holds `text`, atomically.

    Raises:
        UserError: if the disk is full or cannot be written.
    """
    scratch = path.with_name(f".{path.name}.incomplete")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(text, encoding="utf-8")
        _sync(scratch)
        os.replace(scratch, path)
    except OSError as error:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise UserError(_explain(error, path)) from error


def verify(path: Path) -> list[str]:
    """Compare a folder with its manifest; the list of what is wrong is empty if all is well."""
    try:
        entries = json.loads((path / MANIFEST).read_text())["files"]
        files = {name: (int(e["bytes"]), str(e["sha256"])) for name, e in entries.items()}
    except FileNotFoundError:
        return [f"{MANIFEST} is missing"]
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        return [f"{MANIFEST} cannot be read ({error})"]
    problems = []
    for name, (size, digest) in files.items():
        file = path / name
        if not file.is_file():
            problems.append(f"{name} is missing")
        elif file.stat().st_size != size:
            problems.append(f"{name} has {file.stat().st_size} bytes, not {size}")
        elif _digest(file) != digest:
            problems.append(f"{name} is damaged: its SHA-256 does not match the manifest")
    return problems


def _explain(error: BaseException, path: Path) -> str:
    return f"cannot write {path}: {error}. Nothing half-written was left; free room and try again."


def _write_manifest(folder: Path) -> None:
    files = {
        str(file.relative_to(folder)): {"bytes": file.stat().st_size, "sha256": _digest(file)}
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    (folder / MANIFEST).write_text(json.dumps({"files": files}, indent=1) + "\n")


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        while block := handle.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
