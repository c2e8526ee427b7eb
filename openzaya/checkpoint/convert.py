"""From one dialect to another, as bytes, in small memory.

No conversion changes a number: tensors are renamed, and experts stacked or taken apart. So data is
copied piece by piece from file to file, checked on its way (finite, and equal to its checksum), and
neither side is ever in memory. All that can be known from headers is checked before the first byte
is written.

The result is written beside its final place and renamed when complete. Until then it has no
config.json, so nothing can take it for a checkpoint. Finished shards of an interrupted conversion
are taken over by the next one, if source and plan are the same.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from io import FileIO
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from openzaya.checkpoint.atomic import sync, write_text
from openzaya.checkpoint.companions import Companions, read_companions
from openzaya.checkpoint.dialects import (
    SKIP_MEANING,
    Description,
    Dialect,
    describe_folder,
    layout_of,
    write_config,
)
from openzaya.checkpoint.headers import TORCH_DTYPES, write_header
from openzaya.checkpoint.lora import WEIGHTS as ADAPTER_WEIGHTS
from openzaya.checkpoint.lora import read_adapter
from openzaya.checkpoint.lora_names import CONFIG as ADAPTER_CONFIG
from openzaya.checkpoint.manifest import FileRecord, record, write_manifest
from openzaya.checkpoint.tensors import Entry, Layout
from openzaya.checkpoint.weights import (
    CHUNK,
    CONFIG,
    INDEX,
    WEIGHTS,
    Stored,
    check_finite,
    chunks,
    find_weights,
    fit,
    read,
)
from openzaya.errors import UserError
from openzaya.model.lora import merged

SHARD_BYTES = 5_000_000_000
_VERSION = 1
_WRITE = 1 << 20


@dataclass(frozen=True)
class Shard:
    """One file of the result: its name and the tensors that it holds."""

    name: str
    items: list[tuple[Entry, list[Stored]]]

    @property
    def nbytes(self) -> int:
        """Size of its data."""
        return sum(part.span.nbytes for _, parts in self.items for part in parts)


@dataclass
class Plan:
    """A conversion that can be carried out: everything but the data itself has been checked.

    Attributes:
        source, target: folders.
        described: configuration of the source.
        dialect: of the result.
        config: content of its config.json.
        shards: of the result.
        companions: other files of it.
        notes: what the user should know.
        edits: what becomes of tensors that are not copied as they are, by logical name.
        merged: digests of the adapter that the edits come from.
    """

    source: Path
    target: Path
    described: Description
    dialect: Dialect
    config: dict[str, Any]
    shards: list[Shard]
    companions: Companions
    notes: list[str] = field(default_factory=list)
    edits: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    merged: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Size of all tensors."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def layout(self) -> Layout:
        """Of the result's tensors."""
        return layout_of(self.dialect)

    @property
    def scratch(self) -> Path:
        """Where the result grows."""
        return self.target.with_name(f".{self.target.name}.converting")

    @property
    def journal(self) -> Path:
        """Which of its shards are done."""
        return self.scratch.with_suffix(".converting.json")

    def fingerprint(self) -> str:
        """Equal only for the same source files and the same result."""
        files = sorted({part.file for shard in self.shards for _, ps in shard.items for part in ps})
        stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        shards = [(shard.name, [e.native for e, _ in shard.items]) for shard in self.shards]
        source = str(self.source.resolve())
        content = [_VERSION, source, stats, self.dialect, self.config, shards, self.merged]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def plan_conversion(
    source: Path,
    target: Path,
    dialect: Dialect,
    shard_bytes: int = SHARD_BYTES,
    force: bool = False,
    adapter: Path | None = None,
) -> Plan:
    """Check everything that needs no tensor data.

    Args:
        source: a checkpoint folder in any dialect.
        target: a folder that does not exist yet.
        shard_bytes: size at which a new file is begun (a tensor is never cut).
        force: convert a model whose skip class may fire to a dialect whose readers take the skip
            class for something else; config.json then records what it means.
        adapter: folder of a LoRA adapter to merge.

    Raises:
        UserError: if the source is no whole checkpoint of its dialect, the target cannot express
            it, exists already, or has no room.
    """
    _check_target(source, target)
    described = describe_folder(source)
    config = described.model
    fitted = fit(find_weights(source), config, described.layout, source)
    stored = next(parts[0].span.dtype for entry, parts in fitted if entry.is_matrix)
    dtype = str(TORCH_DTYPES[stored]).removeprefix("torch.")
    written = write_config(config, dialect, dtype, described.eos)
    notes = []
    if SKIP_MEANING.get(dialect, config.skip_expert) != config.skip_expert:
        notes = _check_skip(described, dialect, fitted, force)
    if not config.residual_in_fp32 and dialect == "C":
        notes.append(
            "trained with a residual stream in the compute dtype, which other readers of dialect C "
            "keep in fp32; config.json records it"
        )
    companions = read_companions(source, described)
    notes += companions.notes
    plan = Plan(
        source, target, described, dialect, written, _shards(fitted, shard_bytes), companions, notes
    )
    if adapter is not None:
        lora = read_adapter(adapter, config)
        plan.edits = {name: partial(merged, name, adapter=lora) for name in lora.pairs}
        plan.merged = [record(adapter / name).sha256 for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
    _check_room(plan)
    return plan


def _check_target(source: Path, target: Path) -> None:
    if target.exists():
        raise UserError(f"{target} exists already; remove it, or choose another folder.")
    if not target.name or source.resolve() in (target.resolve(), *target.resolve().parents):
        raise UserError(f"{target} lies inside the source {source}; choose another folder.")


def _check_skip(
    described: Description, dialect: Dialect, fitted: list[tuple[Entry, list[Stored]]], force: bool
) -> list[str]:
    """Whether it matters that readers of the target take the skip class for something else.

    The chosen class is the largest of probability + bias. Probabilities lie between 0 and 1, so
    the skip class, with bias s, can win only if 1 + s is more than the largest bias of an expert.
    """
    meant, read_as = described.model.skip_expert, SKIP_MEANING[dialect]
    firing = []
    for entry, parts in fitted:
        if entry.is_biases:
            biases = read(entry, parts)
            if 1 + biases[-1] > biases[:-1].max():
                firing.append(entry.block)
    if not firing:
        return []
    what = (
        f"tokens can take the skip class (first in block {firing[0]}), which this checkpoint means "
        f"as {meant!r}, but readers of dialect {dialect} take as {read_as!r}"
    )
    if not force:
        raise UserError(
            f"{what}: they would compute something else. --force writes it all the same, and "
            "records the meaning in config.json, where this program finds it."
        )
    return [f"{what}; config.json records what is meant"]


def _shards(fitted: list[tuple[Entry, list[Stored]]], shard_bytes: int) -> list[Shard]:
    groups: list[list[tuple[Entry, list[Stored]]]] = [[]]
    size = 0
    for entry, parts in fitted:
        nbytes = sum(part.span.nbytes for part in parts)
        if groups[-1] and size + nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append((entry, parts))
        size += nbytes
    if len(groups) == 1:
        return [Shard(WEIGHTS, groups[0])]
    return [
        Shard(f"model-{number:05d}-of-{len(groups):05d}.safetensors", group)
        for number, group in enumerate(groups, 1)
    ]


def _check_room(plan: Plan) -> None:
    parent = plan.target.resolve().parent
    while not parent.exists():
        parent = parent.parent
    there = sum(file.stat().st_size for file in plan.scratch.glob("*.safetensors"))
    need, free = plan.nbytes - there, shutil.disk_usage(parent).free
    if free < need:
        raise UserError(
            f"{parent} has {free / 1e9:.1f} GB free, the result needs {need / 1e9:.1f} GB more."
        )


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
        with _exclusive(plan.scratch):
            try:
                return _convert(plan, progress)
            except UserError:
                shutil.rmtree(plan.scratch, ignore_errors=True)
                plan.journal.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise UserError(
            f"cannot write {plan.target}: {error}. What is done is kept: free room, and the same "
            "command goes on."
        ) from error


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise UserError(f"another process is writing {folder}; wait for it.") from error
    finally:
        os.close(handle)


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
        if content["plan"] == plan.fingerprint():
            done = dict(content["shards"])
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
    content = {
        "plan": plan.fingerprint(),
        "shards": {name: made.to_json() for name, made in records.items()},
    }
    write_text(plan.journal, json.dumps(content))


def _settle(plan: Plan, shard: Shard, made: FileRecord, records: dict[str, FileRecord]) -> None:
    """Wait for the disk, then count the shard as done."""
    sync(plan.scratch / shard.name)
    records[shard.name] = made
    _note_progress(plan, records)


def _write_shard(plan: Plan, shard: Shard, progress: Callable[[int], None]) -> FileRecord:
    """Copy one shard's data; reading, hashing and writing go on at the same time."""
    layout = plan.layout
    targets = {
        name: (parts[0].span.dtype, entry.part_shape(layout))
        for entry, parts in shard.items
        for name in entry.names(layout)
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
    for entry, parts in shard.items:
        edit = plan.edits.get(entry.native)
        if edit is not None:
            data = edit(read(entry, parts)).contiguous().view(-1).view(torch.uint8).numpy()
            check_finite(data, parts[0])
            yield from (data[i : i + CHUNK] for i in range(0, len(data), CHUNK))
            continue
        for part in parts:
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
    (scratch / CONFIG).write_text(json.dumps(plan.config, indent=2) + "\n")
    write_manifest(scratch, records)
    for file in (*scratch.iterdir(), scratch):
        sync(file)
    scratch.rename(plan.target)
    plan.journal.unlink()
    sync(plan.target.parent)
