"""Files and folders that appear whole or not at all.

A folder is written under a hidden name, every file is synced to disk, a manifest with SHA-256
digests is added, and one rename makes it visible. Whatever is interrupted leaves only the hidden
folder, which the next writer removes.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from openzaya.checkpoint.manifest import write_manifest
from openzaya.errors import UserError

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
        write_manifest(scratch)
        for file in (*scratch.rglob("*"), scratch):
            sync(file)
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
        sync(path.parent)
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise UserError(explain_write(error, path)) from error
    except BaseException as error:
        shutil.rmtree(scratch, ignore_errors=True)
        # Writers of foreign libraries wrap the system's error in one of their own.
        if any(sign in str(error).lower() for sign in _FOREIGN_SIGNS):
            raise UserError(explain_write(error, path)) from error
        raise


def write_text(path: Path, text: str) -> None:
    """Replace `path` by a file that holds `text`, atomically; errors as `write_bytes`."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` by a file with this content, atomically.

    Raises:
        UserError: if the disk is full or cannot be written.
    """
    scratch = path.with_name(f".{path.name}.incomplete")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_bytes(content)
        sync(scratch)
        os.replace(scratch, path)
    except OSError as error:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise UserError(explain_write(error, path)) from error


def explain_write(error: BaseException, path: Path) -> str:
    """What to tell a user whose disk refused a write."""
    return f"cannot write {path}: {error}. Nothing half-written was left; {write_advice(error)}."


def write_advice(error: BaseException) -> str:
    """What may help."""
    if isinstance(error, OSError) and error.errno not in (errno.ENOSPC, errno.EDQUOT, None):
        return "choose a place that can be written"
    return "free room and try again"


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
