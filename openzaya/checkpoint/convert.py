"""From one dialect to another, as bytes, in small memory.

No conversion changes a number: tensors are renamed, and experts stacked or taken apart. So data is
copied piece by piece from file to file, checked on its way (finite, and equal to its checksum), and
neither side is ever in memory. All that can be known from headers is checked before the first byte
is written (`plan.py`).

The result is written beside its final place and renamed when complete. Its config.json is written
last, so that nothing can take a part of it for a checkpoint. Finished shards of an interrupted
conversion are taken over by the next one, if source and plan are the same.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from io import FileIO
from itertools import cycle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from openzaya.checkpoint.atomic import sync, write_text
from openzaya.checkpoint.companions import CARRIED
from openzaya.checkpoint.headers import TORCH_DTYPES, write_header
from openzaya.checkpoint.manifest import MANIFEST, FileRecord, record, write_manifest
from openzaya.checkpoint.plan import Plan, Shard, check_target
from openzaya.checkpoint.weights import CHUNK, CONFIG, INDEX, chunks, read
from openzaya.errors import UserError

_WRITE = 1 << 20


def convert(plan: Plan, progress: Callable[[int], None] = lambda count: None) -> int:
    """Carry a plan out.

    Args:
        progress: called with each number of bytes that has been written.

    Returns:
        Bytes that an earlier, interrupted conversion had written already.

    Raises:
        UserError: if data is damaged or not finite, the disk is full, or another process converts
            to the same target. A bad source leaves nothing behind; after a full disk or an
            interruption the next call goes on.
    """
    try:
        plan.scratch.mkdir(parents=True, exist_ok=True)
        with _exclusive(plan):
            _check_scratch(plan)
            try:
                check_target(plan.source, plan.target)  # nobody else has finished it meanwhile
                return _convert(plan, progress)
            except UserError:
                shutil.rmtree(plan.scratch, ignore_errors=True)
                plan.journal.unlink(missing_ok=True)
                raise
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = (
            "What is done is kept: free room, and the same command goes on"
            if full
            else "Choose a place that can be written"
        )
        raise UserError(f"cannot convert to {plan.target}: {error}. {advice}.") from error


@contextmanager
def _exclusive(plan: Plan) -> Iterator[None]:
    handle = os.open(plan.scratch, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"another process is writing {plan.scratch}; wait for it.") from error
        yield
    finally:
        os.close(handle)


def _check_scratch(plan: Plan) -> None:
    """Nothing is removed but what a conversion has written."""
    ours = ("model*.safetensors", CONFIG, INDEX, MANIFEST, *CARRIED)
    for path in plan.scratch.iterdir():
        if path.is_dir() or not any(fnmatch(path.name, name) for name in ours):
            raise UserError(
                f"{plan.scratch} holds {path.name}, which no conversion wrote; move it away first."
            )


def _convert(plan: Plan, progress: Callable[[int], None]) -> int:
    records = _resume(plan)
    kept = sum(shard.nbytes for shard in plan.shards if shard.name in records)
    progress(kept)
    with ThreadPoolExecutor(1) as flusher:
        pending = []
        for shard in plan.shards:
            if shard.name not in records:
                made = _write_shard(plan, shard, progress)
                pending.append(flusher.submit(_settle, plan, shard, made, records))
        for job in pending:
            job.result()
    _finish(plan, records)
    return kept


def _resume(plan: Plan) -> dict[str, FileRecord]:
    """Shards that an earlier attempt at the same plan has finished; the rest is removed."""
    done: dict[str, Any] = {}
    with suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads(plan.journal.read_text())
        if content["plan"] == plan.fingerprint:
            done = dict(content["shards"])
        else:
            plan.notes.append("an unfinished conversion of something else was replaced")
    records: dict[str, FileRecord] = {}
    for shard in plan.shards:
        path = plan.scratch / shard.name
        if shard.name in done and path.is_file():
            with suppress(UserError):
                made = record(path)
                if made.to_json() == done[shard.name]:
                    records[shard.name] = made
    for path in plan.scratch.iterdir():
        if path.name not in records:
            path.unlink()
    _note_progress(plan, records)
    return records


def _note_progress(plan: Plan, records: dict[str, FileRecord]) -> None:
    plan.check_source()
    content = {
        "plan": plan.fingerprint,
        "shards": {name: made.to_json() for name, made in records.items()},
    }
    try:
        write_text(plan.journal, json.dumps(content))
    except UserError as error:  # not the source's fault: what is done stays
        raise error.__cause__ or error from error


def _settle(plan: Plan, shard: Shard, made: FileRecord, records: dict[str, FileRecord]) -> None:
    """Wait for the disk, then count the shard as done."""
    sync(plan.scratch / shard.name)
    records[shard.name] = made
    _note_progress(plan, records)


def _write_shard(plan: Plan, shard: Shard, progress: Callable[[int], None]) -> FileRecord:
    """Copy one shard's data; reading, hashing and writing go on at the same time."""
    layout = plan.layout
    targets = {
        name: (item.dtype, item.entry.part_shape(layout))
        for item in shard.items
        for name in item.entry.names(layout)
    }
    header, spans = write_header(targets)
    digest = hashlib.sha256(header)
    checksums: dict[str, int] = {}
    names = iter(spans)
    name, left, crc = "", 0, 0
    # Three buffers: one is read into, one hashed, one written.
    pieces = _pieces(plan, shard, cycle([np.empty(CHUNK, np.uint8) for _ in range(3)]))
    with (
        (plan.scratch / shard.name).open("wb", buffering=0) as file,
        ThreadPoolExecutor(1) as reader,
        ThreadPoolExecutor(1) as hasher,
    ):
        _write(file, memoryview(header))
        hashed = hasher.submit(lambda: None)
        ahead = reader.submit(next, pieces, None)
        while (piece := ahead.result()) is not None:
            hashed.result()
            hashed = hasher.submit(digest.update, piece.data)
            ahead = reader.submit(next, pieces, None)
            start = 0
            while start < len(piece):
                if not left:
                    name, crc = next(names), 0
                    left = spans[name].nbytes
                part = piece[start : start + left]
                crc = zlib.crc32(part.data, crc)
                start, left = start + len(part), left - len(part)
                if not left:
                    checksums[name] = crc
            _write(file, piece.data)
            progress(len(piece))
        hashed.result()
        size = file.tell()
    return FileRecord(size, digest.hexdigest(), checksums)


def _write(file: FileIO, data: memoryview) -> None:
    while data:  # page caches take a megabyte at a time faster than more
        data = data[file.write(data[:_WRITE]) :]
    # Starts the disk on it now, not when all is written, and keeps caches for what is read again.
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _pieces(
    plan: Plan, shard: Shard, buffers: Iterator[NDArray[np.uint8]]
) -> Iterator[NDArray[np.uint8]]:
    """The shard's data in order: parts of a stack, or a stack that is taken apart, alike."""
    for item in shard.items:
        edit = plan.edits.get(item.entry.native)
        if edit is not None:
            tensor = edit(read(item.entry, item.parts, TORCH_DTYPES[item.dtype])).contiguous()
            if not bool(torch.isfinite(tensor).all()):
                raise UserError(
                    f"with the adapter merged, {item.entry.native} has values that "
                    f"{item.dtype} cannot hold."
                )
            data = tensor.view(-1).view(torch.uint8).numpy()
            yield from (data[i : i + CHUNK] for i in range(0, len(data), CHUNK))
            continue
        for part in item.parts:
            yield from chunks(part, buffers)


def _finish(plan: Plan, records: dict[str, FileRecord]) -> None:
    """Everything but the weights, then the rename that makes the result a checkpoint."""
    scratch = plan.scratch
    for name, content in plan.companions.files.items():
        (scratch / name).write_bytes(content)
    if len(plan.shards) > 1:
        weight_map = {name: file for file, made in records.items() for name in made.tensors or {}}
        index = {
            "metadata": {"total_size": plan.nbytes},
            "weight_map": dict(sorted(weight_map.items())),
        }
        (scratch / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    config = (json.dumps(plan.config, indent=2) + "\n").encode()
    digest = FileRecord(len(config), hashlib.sha256(config).hexdigest())
    write_manifest(scratch, {**records, CONFIG: digest})
    (scratch / CONFIG).write_bytes(config)
    for file in (*scratch.iterdir(), scratch):
        sync(file)
    plan.check_source()
    check_target(plan.source, plan.target)
    scratch.rename(plan.target)
    with suppress(OSError):  # the result is complete
        plan.journal.unlink()
        sync(plan.target.parent)
