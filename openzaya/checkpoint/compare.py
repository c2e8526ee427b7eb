"""Are two checkpoints the same model? Tensor by tensor in any dialects, then by their logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from openzaya.checkpoint.dialects import Description, describe_folder, differences
from openzaya.checkpoint.load import load_model
from openzaya.checkpoint.tensors import Entry
from openzaya.checkpoint.weights import Fitted, Stored, chunks, find_weights, fit, read

DIAGNOSED = 32
"""Tensors of which it is found out how they differ: that takes longer than the difference."""


@dataclass(frozen=True)
class Different:
    """A tensor that the two do not share.

    Attributes:
        name: its logical (native) name.
        how: in words.
    """

    name: str
    how: str


@dataclass
class Verification:
    """What was compared, and what differs.

    Attributes:
        dialects: of the two.
        settings: configuration fields that differ, each with both values.
        tensors: number of logical tensors of the first.
        same: of them, those that are equal bit by bit.
        nbytes: of the first checkpoint's data.
        different: tensors that differ.
        logits: how many logits differ, and by how much at most; None if they were not computed,
            or the vocabularies differ.
    """

    dialects: tuple[str, str]
    settings: list[str] = field(default_factory=list)
    tensors: int = 0
    same: int = 0
    nbytes: int = 0
    different: list[Different] = field(default_factory=list)
    logits: tuple[int, float] | None = None

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        same_logits = self.logits is None or not self.logits[0]
        return not self.settings and not self.different and same_logits

    def to_json(self) -> dict[str, Any]:
        """Nested dict of plain values."""
        return {"equal": self.equal, **asdict(self)}


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose tensors have been found and fitted to its configuration."""

    folder: Path
    described: Description
    fitted: Fitted

    @property
    def nbytes(self) -> int:
        """Size of its tensors."""
        return sum(part.span.nbytes for _, parts in self.fitted for part in parts)


def open_for_reading(folder: Path) -> Opened:
    """Read configuration and headers.

    Raises:
        UserError: if it is no whole checkpoint.
    """
    described = describe_folder(folder)
    return Opened(
        folder, described, fit(find_weights(folder), described.model, described.layout, folder)
    )


def check_data(opened: Opened, progress: Callable[[int], None] = lambda count: None) -> None:
    """Read all tensors of one checkpoint.

    Raises:
        UserError: if a value is not finite, or a tensor does not match its checksum.
    """
    for _, parts in opened.fitted:
        for part in parts:
            for piece in chunks(part):
                progress(len(piece))


def compare(
    a: Opened, b: Opened, progress: Callable[[int], None] = lambda count: None
) -> Verification:
    """Compare settings, and all tensors that both have, bit by bit.

    Args:
        progress: called with each number of bytes of `a` that has been compared.

    Raises:
        UserError: as `check_data`.
    """
    result = Verification((a.described.dialect, b.described.dialect))
    result.settings = _settings(a.described, b.described)
    theirs = {entry.native: (entry, parts) for entry, parts in b.fitted}
    ours = {entry.native for entry, _ in a.fitted}
    result.different = [Different(n, f"only in {b.folder}") for n in theirs if n not in ours]
    result.nbytes = a.nbytes
    result.tensors = len(a.fitted)
    for entry, parts in a.fitted:
        if entry.native not in theirs:
            result.different.append(Different(entry.native, f"only in {a.folder}"))
            continue
        other, other_parts = theirs[entry.native]
        if entry.shape != other.shape:
            how = f"shapes {list(entry.shape)} and {list(other.shape)}"
        elif parts[0].span.dtype != other_parts[0].span.dtype:
            how = f"stored as {parts[0].span.dtype} and as {other_parts[0].span.dtype}"
            how += _values(entry, parts, other_parts)
        elif not _same_bytes(parts, other_parts):
            how = "different values"
            if len(result.different) < DIAGNOSED:
                how = _diagnose(entry, parts, other_parts, a, b)
        else:
            how = ""
        if how:
            result.different.append(Different(entry.native, how))
        else:
            result.same += 1
        progress(sum(part.span.nbytes for part in parts))
    return result


def compare_logits(a: Path, b: Path) -> tuple[int, float] | None:
    """fp32 logits of both on the probe batch of `trace.py`; one model at a time is in memory.

    Returns:
        How many differ in any bit, and the largest difference; None for models whose probes or
        vocabularies differ.
    """
    first, second = probe_logits(a), probe_logits(b)
    if first.shape != second.shape:
        return None
    unequal = first != second
    return int(unequal.sum()), float((first - second).abs().max())


@torch.no_grad()
def probe_logits(folder: Path) -> Tensor:
    """[real tokens, vocab] fp32 logits of a checkpoint, computed in fp32 from weights as stored."""
    from openzaya.checkpoint.trace import make_probe

    model = load_model(folder, torch.float32, matrices="stored")
    probe = make_probe(model.config)
    hidden = model(probe.tokens, probe.positions, probe.padding_mask).hidden
    return model.logits(hidden[probe.padding_mask])


def _settings(a: Description, b: Description) -> list[str]:
    """What differs in what the two compute, in words."""
    found = differences(a.model, b.model)
    found.pop("eos_token_id", None)
    if a.eos != b.eos:
        found["eos_token_id"] = (list(a.eos), list(b.eos))
    return [f"{name}: {ours!r} and {theirs!r}" for name, (ours, theirs) in found.items()]


def _stream(parts: list[Stored]) -> Iterator[NDArray[np.uint8]]:
    for part in parts:
        yield from chunks(part)


def _same_bytes(ours: list[Stored], theirs: list[Stored]) -> bool:
    """Whether two lists of parts hold the same bytes, wherever the parts are cut."""
    left, right = _stream(ours), _stream(theirs)
    a = b = np.empty(0, np.uint8)
    same = True
    while True:
        a = a if len(a) else next(left, a)
        b = b if len(b) else next(right, b)
        count = min(len(a), len(b))
        if not count:
            return same and len(a) == len(b)
        # Both are read to their ends all the same, for their checks.
        same = same and np.array_equal(a[:count], b[:count])
        a, b = a[count:], b[count:]


def _values(entry: Entry, ours: list[Stored], theirs: list[Stored]) -> str:
    equal = torch.equal(read(entry, ours, torch.float32), read(entry, theirs, torch.float32))
    return ", with equal values" if equal else ", with different values"


def _diagnose(entry: Entry, ours: list[Stored], theirs: list[Stored], a: Opened, b: Opened) -> str:
    """What converters do to tensors, tried in turn."""
    x, y = read(entry, ours), read(entry, theirs)
    if entry.row.dims[-2:-1] == ("2I",):
        gate, up = y.chunk(2, dim=-2)
        if torch.equal(x, torch.cat([up, gate], dim=-2)):
            return "gate and up rows are swapped"
    if x.ndim > 1 and x.shape[-1] == x.shape[-2] and torch.equal(x, y.transpose(-1, -2)):
        return "transposed"
    if x.ndim > 1 and torch.equal(x, y.flip(-1)):
        return "the last axis is reversed"
    if entry.row.stacked:
        if torch.equal(x, y.flip(0)):
            return "the experts are in reverse order"
        if sorted(_homes(x, y)) == list(range(len(x))):
            return "the experts are in another order"
    if x.dtype == torch.float32 and torch.equal(x.bfloat16(), y.bfloat16()):
        return "equal when rounded to bfloat16: one of the two has been rounded"
    for (own, own_parts), (other, parts) in zip(a.fitted, b.fitted, strict=False):
        related = other.row.dims == entry.row.dims and other.native != entry.native
        # Where neighbours are alike in the first place, that they match means nothing.
        if (
            related
            and other.shape == entry.shape
            and _same_beginning(ours, parts)
            and torch.equal(x, read(other, parts))
            and not (own.native == other.native and torch.equal(x, read(own, own_parts)))
        ):
            return f"the other one stores it as {other.native}"
    different = torch.count_nonzero(x != y).item() / x.numel()
    rows = zip(x.split(1 << 12), y.split(1 << 12), strict=True)
    largest = max(float((p.float() - q.float()).abs().max()) for p, q in rows)
    return f"{100 * different:.3g} % of the values differ, by {largest:.2e} at most"


def _same_beginning(ours: list[Stored], theirs: list[Stored]) -> bool:
    """Whether it is worth reading all of a tensor to see whether it is another one."""
    with ours[0].file.open("rb") as one, theirs[0].file.open("rb") as other:
        one.seek(ours[0].span.begin)
        other.seek(theirs[0].span.begin)
        return one.read(64) == other.read(64)


def _homes(x: Tensor, y: Tensor) -> list[int]:
    """For each expert of x the expert of y that equals it, -1 if none does."""
    return [next((j for j in range(len(y)) if torch.equal(e, y[j])), -1) for e in x]
