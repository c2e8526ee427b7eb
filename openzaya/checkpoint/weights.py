"""The stored tensors of a checkpoint folder: found, fitted to the table, and read piece by piece.

Nothing is guessed. Every stored tensor must be one that the configuration calls for, with its shape
and an allowed dtype, and every one that is called for must be there; values must be finite, and
match their checksums where the folder's manifest has some.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from openzaya.checkpoint.headers import TORCH_DTYPES, Span, read_header
from openzaya.checkpoint.manifest import is_file, read_manifest
from openzaya.checkpoint.tensors import (
    BIASES_DTYPE,
    MATRIX_DTYPES,
    Entry,
    Layout,
    canonical,
    depth_of,
    entries,
    experts_of,
    explain,
    guess_layout,
)
from openzaya.errors import UserError
from openzaya.model.config import ModelConfig

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

CHUNK = 1 << 22
"""Bytes that are read at once: few enough to stay in a cache, many enough to cost no time."""

_STRIDE = 1 << 19
_ABSURD = 1000  # more layers or experts than there are tensors of need no list of what is missing
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_EXPONENTS = {
    "BF16": (np.uint16, 0x7F80),
    "F16": (np.uint16, 0x7C00),
    "F32": (np.uint32, 0x7F800000),
}
"""Unsigned view of each dtype and the bits of its exponent, all set where a value is not finite."""


@dataclass(frozen=True)
class Stored:
    """One tensor in a file.

    Attributes:
        file, name, span: where it is.
        crc: CRC-32 of its data by the folder's manifest, None if there is no such record.
    """

    file: Path
    name: str
    span: Span
    crc: int | None


Fitted = list[tuple[Entry, list[Stored]]]
"""Every tensor of a model, with the stored parts that make it up, in stacking order."""


def find_weights(folder: Path) -> dict[str, Stored]:
    """All tensors of the folder's weights, by stored name; no data is read.

    Raises:
        UserError: if there are no weights, a file is missing or damaged, or index and files
            disagree.
    """
    index = folder / INDEX
    weight_map: dict[str, str] | None = None
    if index.exists():
        weight_map = _weight_map(index)
    files = sorted(set(weight_map.values())) if weight_map is not None else [WEIGHTS]
    stray = sorted({file.name for file in folder.glob("model*.safetensors")} - set(files))
    if weight_map is None and not (folder / WEIGHTS).exists():
        raise _no_weights(folder, stray)
    if stray:
        said = f"not in {INDEX}" if weight_map is not None else f"there beside {WEIGHTS}"
        raise UserError(
            f"{folder}: {stray[0]} is {said}: remove whichever of the two is left over from "
            "another checkpoint."
        )
    records = read_manifest(folder) or {}
    found: dict[str, Stored] = {}
    for file_name in files:
        file = folder / file_name
        if not is_file(file):
            raise UserError(f"{folder} is no complete checkpoint: {file_name} is missing.")
        spans = read_header(file).spans
        record = records.get(file_name)
        checksums = (record.tensors if record is not None else None) or {}
        if checksums and checksums.keys() != spans.keys():
            odd = sorted(checksums.keys() ^ spans.keys())[0]
            raise UserError(
                f"{file} is not the file of the manifest: tensor {odd} is in only one of the two."
            )
        for name, span in spans.items():
            if name in found:
                raise UserError(
                    f"{folder}: {name} is stored twice, in {found[name].file.name} and in "
                    f"{file_name}."
                )
            if weight_map is not None and weight_map.get(name) != file_name:
                listed = weight_map.get(name)
                raise UserError(
                    f"{folder}: {file_name} holds {name}, which {INDEX} "
                    + (f"says is in {listed}." if listed else "does not list.")
                )
            found[name] = Stored(file, name, span, checksums.get(name))
    for name, file_name in (weight_map or {}).items():
        if name not in found:
            raise UserError(f"{folder}: {INDEX} says that {file_name} holds {name}; it does not.")
    return found


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        pairs = dict(weight_map.items())
    except (AttributeError, KeyError, OSError, TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{index} is damaged and cannot be read: {error}") from error
    for tensor, file in pairs.items():
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".."):
            raise UserError(f"{index} names no file of its own folder for {tensor}: {file!r}.")
    return pairs


def _no_weights(folder: Path, stray: list[str]) -> UserError:
    if stray:
        return UserError(f"{folder} is no complete checkpoint: there is {stray[0]} but no {INDEX}.")
    pickles = sorted(file.name for file in folder.glob("*.bin")) if folder.is_dir() else []
    if pickles:
        return UserError(
            f"{folder} has {pickles[0]} but no {WEIGHTS}: pickles can run code and are not opened. "
            "Save the model again as safetensors."
        )
    return UserError(f"{folder} is no complete checkpoint: {WEIGHTS} is missing.")


def fit(stored: dict[str, Stored], config: ModelConfig, layout: Layout, folder: Path) -> Fitted:
    """Find every tensor of a model among the stored ones.

    Args:
        layout: that the configuration's dialect goes with.
        folder: named in errors.

    Raises:
        UserError: naming what is missing, unknown, twice there, or of a wrong shape or dtype.
    """
    stored = dict(stored)
    seen = guess_layout(stored)
    if seen is not None and seen[0] != layout:
        raise UserError(
            f"{folder}: {CONFIG} is of a dialect with the {layout} tensor names, but {seen[1]} is "
            f"a {seen[0]} name. One of the two belongs to another checkpoint."
        )
    problems = _check_size(stored, config, layout, folder)
    if layout == "legacy":
        renamed: dict[str, Stored] = {}
        for name, tensor in stored.items():
            if (other := renamed.get(canonical(name))) is not None:
                problems.append(f"{other.name} and {name} are names of the same tensor")
            renamed[canonical(name)] = tensor
        stored = renamed
    wanted = entries(config)
    if config.tie_word_embeddings and _HEAD in stored:
        _check_repeated_head(stored.pop(_HEAD), stored.get(_EMBEDDING), folder)
    fitted: Fitted = []
    matrices = _matrix_dtype(stored, wanted, layout)
    missing = []
    for entry in wanted:
        parts = []
        for name in entry.names(layout):
            part = stored.pop(name, None)
            if part is None:
                missing.append(f"{name} is missing")
                continue
            problems += _shape_problem(part, entry, config, layout)
            problems += _dtype_problem(part, entry, matrices)
            parts.append(part)
        if len({part.span.dtype for part in parts}) > 1:
            problems.append(f"{parts[0].name} and the other experts differ in dtype")
        fitted.append((entry, parts))
    problems += missing
    problems += [f"{tensor.name} is unknown" for _, tensor in sorted(stored.items())]
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise UserError(
            f"the weights in {folder} do not match its {CONFIG}: " + "; ".join(problems[:5]) + more
        )
    return fitted


def _check_size(
    stored: dict[str, Stored], config: ModelConfig, layout: Layout, folder: Path
) -> list[str]:
    """Depth and number of experts, before any names are made for a model of absurd size."""
    legacy = layout == "legacy"
    needed = config.num_hidden_layers * (2 if legacy else 1)
    facts = [("half-layers" if legacy else "layers", needed, depth_of(stored))]
    if legacy:
        facts.append(("experts", config.num_experts, experts_of(stored)))
    problems = [
        f"the configuration has {wanted} {unit}, the tensors are of {found}"
        for unit, wanted, found in facts
        if found not in (0, wanted)
    ]
    if any(wanted > found + _ABSURD for _, wanted, found in facts):
        raise UserError(f"the weights in {folder} do not match its {CONFIG}: {'; '.join(problems)}")
    return problems


def _matrix_dtype(stored: dict[str, Stored], wanted: list[Entry], layout: Layout) -> str | None:
    """What the matrices of this checkpoint are stored as: the dtype of most of their bytes."""
    sizes: dict[str, int] = {}
    for entry in wanted:
        for name in entry.names(layout) if entry.is_matrix else ():
            if (part := stored.get(name)) is not None:
                sizes[part.span.dtype] = sizes.get(part.span.dtype, 0) + part.span.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype], default=None)


def _shape_problem(part: Stored, entry: Entry, config: ModelConfig, layout: Layout) -> list[str]:
    needed, shape = entry.part_shape(layout), part.span.shape
    if shape == needed:
        return []
    turned = len(shape) > 1 and (*shape[:-2], shape[-1], shape[-2]) == needed
    reason = "it is transposed" if turned else explain(entry.part_dims(layout), config)
    return [
        f"{part.name} has shape {list(shape)}, the configuration needs {list(needed)} ({reason})"
    ]


def _dtype_problem(part: Stored, entry: Entry, matrices: str | None) -> list[str]:
    dtype = part.span.dtype
    if entry.is_biases:
        if dtype == BIASES_DTYPE:
            return []
        return [f"{part.name} is {dtype}; balancing biases must be {BIASES_DTYPE}"]
    if dtype not in MATRIX_DTYPES:
        return [f"{part.name} is {dtype}; weights are {', '.join(MATRIX_DTYPES)}"]
    if dtype == matrices or (not entry.is_matrix and dtype == "F32"):
        return []
    return [f"{part.name} is {dtype}, but the other matrices are {matrices}"]


def _check_repeated_head(head: Stored, embedding: Stored | None, folder: Path) -> None:
    """Some writers store the tied weight again; that is no contradiction as long as it is equal."""
    same_form = embedding is not None and (
        (head.span.dtype, head.span.shape) == (embedding.span.dtype, embedding.span.shape)
    )
    if embedding is not None and same_form and head.span.dtype in MATRIX_DTYPES:
        pairs = zip(chunks(head), chunks(embedding), strict=True)
        if all(np.array_equal(a, b) for a, b in pairs):
            return
    raise UserError(
        f"{folder}: {_HEAD} differs from {_EMBEDDING}, but {CONFIG} says that they "
        "are tied (tie_word_embeddings)."
    )


def chunks(
    stored: Stored, buffers: Iterator[NDArray[np.uint8]] | None = None
) -> Iterator[NDArray[np.uint8]]:
    """A tensor's data as bytes, piece by piece, each checked.

    Args:
        buffers: of `CHUNK` bytes each, to read into by turns; None takes new ones.

    Raises:
        UserError: if a value is not finite, the file is cut off, or the data does not match its
            checksum (after the last piece).
    """
    crc, left, offset = 0, stored.span.nbytes, stored.span.begin
    handle = os.open(stored.file, os.O_RDONLY)
    try:
        while left:
            buffer = np.empty(CHUNK, np.uint8) if buffers is None else next(buffers)
            piece = buffer[: min(left, CHUNK)]
            _read(handle, piece, offset, stored)
            if stored.crc is not None:
                crc = zlib.crc32(piece.data, crc)
            check_finite(piece, stored)
            left, offset = left - len(piece), offset + len(piece)
            if not left:
                check_crc(crc, stored)
            yield piece
    finally:
        os.close(handle)


def _read(handle: int, piece: NDArray[np.uint8], offset: int, stored: Stored) -> None:
    done = 0
    while done < len(piece):
        count = os.preadv(handle, [piece[done:].data], offset + done)
        if not count:
            raise UserError(f"{stored.file} ended while {stored.name} was read from it.")
        done += count


def check_crc(crc: int, stored: Stored) -> None:
    """Compare with the manifest.

    Raises:
        UserError: if the tensor is not what was written.
    """
    if stored.crc is not None and crc != stored.crc:
        raise UserError(
            f"{stored.file} is damaged: tensor {stored.name} does not match its checksum in the "
            "manifest. Take another copy of this checkpoint."
        )


def check_finite(piece: NDArray[np.uint8], stored: Stored) -> None:
    """Look for infinities and NaNs.

    Raises:
        UserError: if there are any.
    """
    unsigned, exponent = _EXPONENTS[stored.span.dtype]
    for start in range(0, len(piece), _STRIDE):  # what fits into a core's own cache
        values = piece[start : start + _STRIDE].view(unsigned)
        if ((values & unsigned(exponent)) == exponent).any():
            raise UserError(f"{stored.file}: {stored.name} has values that are not finite.")


def read(entry: Entry, parts: list[Stored], dtype: torch.dtype | None = None) -> Tensor:
    """One logical tensor, stacked if it is stored in parts.

    Args:
        dtype: of the result; None leaves the stored one.

    Returns:
        A tensor of entry.shape.

    Raises:
        UserError: as `chunks`.
    """
    stored_dtype = TORCH_DTYPES[parts[0].span.dtype]
    result = torch.empty(entry.shape, dtype=dtype or stored_dtype)
    flat = result.view(-1)
    done = 0
    buffers = [np.empty(CHUNK, np.uint8)] if dtype not in (None, stored_dtype) else []
    for part in parts:
        if not buffers:  # straight into place
            count = part.span.nbytes // stored_dtype.itemsize
            target = flat[done : done + count].view(torch.uint8).numpy()
            pieces = iter([target[i : i + CHUNK] for i in range(0, len(target), CHUNK)])
            for _ in chunks(part, pieces):
                pass
            done += count
            continue
        for piece in chunks(part, cycle(buffers)):
            values = torch.from_numpy(piece).view(stored_dtype)
            flat[done : done + len(values)] = values
            done += len(values)
    return result


def read_all(
    fitted: Fitted, matrices: torch.dtype | None = None, rest: torch.dtype | None = None
) -> dict[str, Tensor]:
    """All tensors by logical name.

    Args:
        matrices: dtype of those that may be computed with in less than fp32; None as stored.
        rest: dtype of all others; None as stored.

    Raises:
        UserError: as `chunks`.
    """

    def one(item: tuple[Entry, list[Stored]]) -> tuple[str, Tensor]:
        entry, parts = item
        return entry.native, read(entry, parts, matrices if entry.is_matrix else rest)

    # Fresh memory costs more than reading: two threads touch it twice as fast.
    with ThreadPoolExecutor(max(2, min(4, os.cpu_count() or 1))) as pool:
        return dict(pool.map(one, fitted))
