"""What a conversion will do, checked as far as headers allow before the first byte is written."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from openzaya.checkpoint.companions import Companions, read_companions
from openzaya.checkpoint.dialects import (
    SKIP_MEANING,
    Description,
    Dialect,
    describe_folder,
    layout_of,
    write_config,
)
from openzaya.checkpoint.headers import TORCH_DTYPES
from openzaya.checkpoint.lora import WEIGHTS as ADAPTER_WEIGHTS
from openzaya.checkpoint.lora import read_adapter
from openzaya.checkpoint.lora_names import CONFIG as ADAPTER_CONFIG
from openzaya.checkpoint.manifest import record
from openzaya.checkpoint.tensors import Entry, Layout
from openzaya.checkpoint.weights import WEIGHTS, Fitted, Stored, find_weights, fit, read
from openzaya.errors import UserError
from openzaya.model.lora import merged

SHARD_BYTES = 5_000_000_000
_VERSION = 2


@dataclass(frozen=True)
class Item:
    """One logical tensor of the result: what it is made of, and the dtype it is stored in."""

    entry: Entry
    parts: list[Stored]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Size of its data."""
        return math.prod(self.entry.shape) * TORCH_DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Shard:
    """One file of the result: its name and the tensors that it holds."""

    name: str
    items: list[Item]

    @property
    def nbytes(self) -> int:
        """Size of its data."""
        return sum(item.nbytes for item in self.items)


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
        fingerprint: equal only for the same source files and the same result.
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
    fingerprint: str = ""

    def __post_init__(self) -> None:
        self.fingerprint = self._fingerprint()

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

    def check_source(self) -> None:
        """Is the source still what the plan was made for?

        Raises:
            UserError: if one of its files has changed.
        """
        if self._fingerprint() != self.fingerprint:
            raise UserError(f"{self.source} changed while it was converted; run it again.")

    def _fingerprint(self) -> str:
        items = [item for shard in self.shards for item in shard.items]
        files = sorted({part.file for item in items for part in item.parts})
        stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        shards = [
            (shard.name, [(item.entry.native, item.dtype) for item in shard.items])
            for shard in self.shards
        ]
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
    check_target(source, target)
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
    edits: dict[str, Callable[[Tensor], Tensor]] = {}
    digests: list[str] = []
    if adapter is not None:
        lora = read_adapter(adapter, config)
        edits = {name: partial(merged, name, adapter=lora) for name in lora.pairs}
        digests = [record(adapter / name).sha256 for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
    shards = _shards(fitted, shard_bytes, edits)
    plan = Plan(
        source, target, described, dialect, written, shards, companions, notes, edits, digests
    )
    if source.resolve() == plan.scratch.resolve():
        raise UserError(f"{source} is where {target} would grow; rename it first.")
    _check_room(plan)
    return plan


def check_target(source: Path, target: Path) -> None:
    """Refuse to write over anything.

    Raises:
        UserError: if the target exists, or lies inside the source.
    """
    if os.path.lexists(target):
        raise UserError(f"{target} exists already; remove it, or choose another folder.")
    if target.name in ("", ".."):
        raise UserError(f"{target} does not name a new folder; choose another one.")
    if source.resolve() in (target.resolve(), *target.resolve().parents):
        raise UserError(f"{target} lies inside the source {source}; choose another folder.")


def _check_skip(described: Description, dialect: Dialect, fitted: Fitted, force: bool) -> list[str]:
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


def _shards(
    fitted: Fitted, shard_bytes: int, edits: dict[str, Callable[[Tensor], Tensor]]
) -> list[Shard]:
    """Distribute tensors over files; what is merged and computed in fp32 is stored in it too."""
    groups: list[list[Item]] = [[]]
    size = 0
    for entry, parts in fitted:
        precise = entry.native in edits and not entry.is_matrix
        item = Item(entry, parts, "F32" if precise else parts[0].span.dtype)
        if groups[-1] and size + item.nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += item.nbytes
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
            f"{parent} has {free / 1e6:,.0f} MB free, the result needs {need / 1e6:,.0f} MB more."
        )
