"""LoRA adapters on disk: the folders of PEFT, in native or in legacy names.

`adapter_config.json` says what is adapted and how strongly, `adapter_model.safetensors` holds the
factors. A linear map has `NAME.lora_A.weight` [rank, in] and `NAME.lora_B.weight` [out, rank], with
DoRA also `NAME.lora_magnitude_vector` [out]. A
native expert stack is a parameter and no module: its factors belong to the module `mlp.experts`,
A as [experts * rank, in] with ranks inside experts, B as [out, rank * experts] with experts inside
ranks. Where both stacks are adapted, one `base_layer` in the name marks the one that was wrapped
first, `gate_up_proj`. Legacy experts are linear maps, each by itself. Settings and names:
`lora_names.py`.

PEFT before 0.19.1 took a stack for [experts, in, out] and stored the transposed factors; those are
refused. PEFT can adapt all that we can, but there are no modules of legacy names in `transformers`'
model, so it opens native adapters only. It sorts `rank_pattern` and `alpha_pattern` when it saves,
and the first match counts: where patterns overlap, its file may not say what was trained, here as
there. We write whole names, which cannot overlap; that PEFT warns that those of stacks match no
module means nothing, it obeys them.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from openzaya.checkpoint.atomic import atomic_folder
from openzaya.checkpoint.lora_names import (
    CONFIG,
    STACKS_SINCE,
    Names,
    Place,
    Settings,
    check_targets,
    check_version,
    read_settings,
    wrapping_depth,
)
from openzaya.checkpoint.tensors import Entry, Layout, entries, has_layout
from openzaya.errors import UserError
from openzaya.model.config import ModelConfig
from openzaya.model.lora import Adapter, Pair, check_shape, is_dora, kind_of, refusal, scale_of

__all__ = ["Adapter", "read_adapter", "save_adapter", "write_adapter"]

WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"

_PREFIX = "base_model.model."
_KEY = re.compile(
    re.escape(_PREFIX)
    + r"(?P<module>.+?)(?P<nesting>(?:\.base_layer)*)\.lora_"
    + r"(?:(?P<side>[AB])\.weight|(?P<magnitude>magnitude_vector))"
)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass
class _Stored:
    """A pair as it is in the file.

    Attributes:
        key: common part of the two names.
        sides: the tensors "A" and "B", and "M", the magnitudes of DoRA.
    """

    key: str
    sides: dict[str, Tensor] = field(default_factory=dict)


def read_adapter(folder: Path, config: ModelConfig, layout: Layout | None = None) -> Adapter:
    """Open an adapter of PEFT.

    Args:
        config: of the model that it is for.
        layout: whose names it uses; None finds out.

    Returns:
        Pairs by logical name, in the stored dtype; expert stacks in one piece.

    Raises:
        UserError: naming the file, setting or tensor, if one is missing, damaged, not implemented,
            not finite, or does not fit the settings, the model or the rest of the file.
    """
    settings = read_settings(folder / CONFIG)
    tensors, marked = _read_tensors(folder)
    where = str(folder / WEIGHTS)
    keys = {}
    for name in tensors:
        match = _KEY.fullmatch(name)
        if match is None:
            raise UserError(f"{where}: {name} is no factor A or B of a matrix.")
        if match["magnitude"] and not settings.use_dora:
            raise UserError(f"{where}: {name} is there, but use_dora is off in {CONFIG}.")
        keys[name] = match
    if not keys:
        raise UserError(f"{where} is empty.")
    names = Names(config)
    layout = layout or marked or names.guess({match["module"] for match in keys.values()})
    if layout is None:
        raise UserError(
            f"{where}: {max(tensors)} is of different blocks by native and by legacy names, and no "
            "other name decides; say which layout it is."
        )
    found: dict[Place, _Stored] = {}
    taken: dict[tuple[str, int | None, str], str] = {}
    parameters = set(settings.target_parameters)
    for name, match in keys.items():
        place = names.place(layout, match, parameters, where)
        side = match["side"] or "M"
        twin = taken.setdefault((place.entry.native, place.expert, side), name)
        if twin != name:
            raise UserError(f"{where}: {twin} and {name} are the same matrix.")
        stored = found.setdefault(place, _Stored(name.rpartition(".lora_")[0]))
        stored.sides[side] = tensors[name]
    check_targets(settings, {place.target for place in found}, names, layout, where)
    parts: dict[str, dict[int | None, Pair]] = defaultdict(dict)
    for place, stored in found.items():
        parts[place.entry.native][place.expert] = _pair(place, stored, settings, layout, where)
    order = [entry for entry in entries(config) if entry.native in parts]
    pairs = {entry.native: _stack(entry, parts[entry.native], where) for entry in order}
    return Adapter(
        pairs,
        settings.r,
        settings.lora_alpha,
        settings.use_rslora,
        settings.base_model_name_or_path,
    )


def _read_tensors(folder: Path) -> tuple[dict[str, Tensor], Layout | None]:
    file = folder / WEIGHTS
    if not file.is_file():
        if (folder / PICKLE).is_file():
            raise UserError(
                f"{folder} has only {PICKLE}, a pickle, which can run code when it is opened and "
                "is not; save the adapter as safetensors with PEFT."
            )
        raise UserError(f"{folder} is no complete adapter: {WEIGHTS} is missing.")
    try:
        with safe_open(file, framework="pt") as handle:
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
            marked = (handle.metadata() or {}).get("layout")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is damaged and cannot be opened: {error}") from error
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise UserError(f"{file}: {name} is {kind}, which is no dtype of an adapter.")
        if not bool(torch.isfinite(tensor).all()):
            raise UserError(f"{file}: {name} has values that are not finite.")
    layouts: dict[str | None, Layout] = {"native": "native", "legacy": "legacy"}
    return tensors, layouts.get(marked)


def _pair(place: Place, stored: _Stored, settings: Settings, layout: Layout, where: str) -> Pair:
    """Check one pair and unfold a native stack."""
    for side in "ABM" if settings.use_dora else "AB":
        if side not in stored.sides:
            spelled = "magnitude_vector" if side == "M" else f"{side}.weight"
            raise UserError(f"{where}: {stored.key}.lora_{spelled} is missing.")
    if settings.use_dora and place.entry.row.stacked:
        raise UserError(f"{where}: {stored.key} is DoRA of experts, which is not implemented.")
    rank, alpha = settings.rank(place.target), settings.alpha(place.target)
    *experts, rows, columns = place.entry.part_shape(layout)
    count = experts[0] if experts else 1
    if experts:
        check_version(settings.peft_version, rows == columns, stored.key, where)
    for side, shape in (("A", (rank * count, columns)), ("B", (rows, rank * count))):
        actual = tuple(stored.sides[side].shape)
        if actual != shape:
            axis, other = (0, 1) if side == "A" else (1, 0)
            reason = f"the model and rank {rank} of {CONFIG} need {list(shape)}"
            if len(actual) == 2 and actual[other] == shape[other] and actual[axis] % count == 0:
                reason = f"its rank is {actual[axis] // count}, but {rank} by {CONFIG}"
            name = f"{stored.key}.lora_{side}.weight"
            raise UserError(f"{where}: {name} has shape {list(actual)}; {reason}.")
    a, b = stored.sides["A"], stored.sides["B"]
    if experts:
        a = a.view(count, rank, columns)
        b = b.view(rows, rank, count).permute(2, 0, 1).contiguous()
    magnitude = stored.sides.get("M")
    if magnitude is not None and tuple(magnitude.shape) != (rows,):
        raise UserError(
            f"{where}: {stored.key}.lora_magnitude_vector has shape {list(magnitude.shape)}; the "
            f"model needs {[rows]}."
        )
    return Pair(a, b, scale_of(rank, alpha, settings.use_rslora), magnitude)


def _stack(entry: Entry, parts: dict[int | None, Pair], where: str) -> Pair:
    """Put the pairs of legacy experts together."""
    if None in parts:
        return parts[None]
    for expert, name in enumerate(entry.legacy):
        module = name.removesuffix(".weight")
        if expert not in parts:
            raise UserError(
                f"{where}: {_PREFIX}{module}.lora_A.weight is missing, but other experts of "
                "the layer are adapted; all must be, or none."
            )
        first, pair = parts[0], parts[expert]
        if (pair.rank, pair.scale, pair.a.dtype) != (first.rank, first.scale, first.a.dtype):
            raise UserError(
                f"{where}: {module} has another rank, scale or dtype than expert 0; the experts of "
                "a layer must agree."
            )
    stacked = [parts[expert] for expert in range(len(entry.legacy))]
    a, b = (torch.stack([getattr(pair, side) for pair in stacked]) for side in ("a", "b"))
    return Pair(a, b, stacked[0].scale)


def write_adapter(
    adapter: Adapter, folder: Path, config: ModelConfig, layout: Layout = "native"
) -> None:
    """Write an adapter as a folder of PEFT, whole or not at all; it replaces an adapter there.

    Args:
        config: of the model that it is for.
        layout: names to use; `transformers`' model has the native ones.

    Raises:
        UserError: if a matrix does not fit the model or is not finite, the layout has no names
            for the model, the folder holds something else, or cannot be written.
    """
    _check_writable(adapter, folder, config, layout)
    with atomic_folder(folder) as scratch:
        save_adapter(adapter, scratch, config, layout)


def save_adapter(
    adapter: Adapter, folder: Path, config: ModelConfig, layout: Layout = "native"
) -> None:
    """Write the files of an adapter into an existing folder (make it with `atomic_folder`).

    Raises:
        UserError: if a matrix does not fit the model or is not finite, or the layout has no names.
    """
    _check_adapter(adapter, config, layout)
    tensors: dict[str, Tensor] = {}
    targets: dict[bool, list[str]] = {False: [], True: []}  # modules, and parameters
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for entry in entries(config):
        pair = adapter.pairs.get(entry.native)
        if pair is None:
            continue
        stack = entry.row.stacked and layout == "native"
        for module, target, a, b in _fold(entry, pair, adapter, layout):
            tensors[f"{_PREFIX}{module}.lora_A.weight"] = a.detach().cpu().contiguous()
            tensors[f"{_PREFIX}{module}.lora_B.weight"] = b.detach().cpu().contiguous()
            if pair.magnitude is not None:
                magnitude = pair.magnitude.detach().cpu().contiguous()
                tensors[f"{_PREFIX}{module}.lora_magnitude_vector"] = magnitude
            targets[stack].append(target)
            if pair.rank != adapter.rank:
                ranks[target] = pair.rank
            if pair.scale != scale_of(pair.rank, adapter.alpha, adapter.use_rslora):
                alphas[target] = _alpha_of(pair, adapter.use_rslora)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base_model,
        "r": adapter.rank,
        "lora_alpha": _whole(adapter.alpha),
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "use_rslora": adapter.use_rslora,
        "target_modules": targets[False],
        "target_parameters": targets[True] or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_dora": is_dora(adapter),
        "inference_mode": True,
        "peft_version": ".".join(map(str, STACKS_SINCE)),
    }
    metadata = {"format": "pt"}
    if Names(config).guess({*targets[False], *targets[True]}) is None:
        metadata["layout"] = layout  # only where needed: entries have no fixed order in the file
    (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
    save_file(tensors, folder / WEIGHTS, metadata)


def _fold(
    entry: Entry, pair: Pair, adapter: Adapter, layout: Layout
) -> Iterator[tuple[str, str, Tensor, Tensor]]:
    """Module, target, A and B of every stored pair that a logical one becomes."""
    if entry.row.stacked and layout == "native":
        module = entry.native.rpartition(".")[0]
        depth = wrapping_depth(entry.native, list(adapter.pairs))
        a, b = pair.a.flatten(0, 1), pair.b.permute(1, 2, 0).flatten(1, 2)
        yield module + ".base_layer" * depth, entry.native, a, b
        return
    stored = zip(pair.a, pair.b, strict=True) if entry.row.stacked else [(pair.a, pair.b)]
    for name, (a, b) in zip(entry.names(layout), stored, strict=True):
        module = name.removesuffix(".weight")
        yield module, module, a, b


def _check_writable(adapter: Adapter, folder: Path, config: ModelConfig, layout: Layout) -> None:
    _check_adapter(adapter, config, layout)
    other = folder.is_file() or any(folder.glob("*"))
    if other and not (folder / CONFIG).is_file():
        raise UserError(f"{folder} is no adapter and is not replaced; choose another folder.")


def _check_adapter(adapter: Adapter, config: ModelConfig, layout: Layout) -> None:
    if not adapter.pairs:
        raise UserError("the adapter changes nothing; there is nothing to write.")
    if not has_layout(config, layout):
        raise UserError(f"the {layout} layout has no names for this model.")
    known = {entry.native: entry.shape for entry in entries(config)}
    for name, pair in adapter.pairs.items():
        if name not in known:
            raise UserError(f"the adapter changes {name}, which the model has not.")
        if kind_of(name) is None:
            raise UserError(refusal(name))
        check_shape(name, known[name], pair)
        for side, tensor in (("A", pair.a), ("B", pair.b), ("the magnitude", pair.magnitude)):
            if tensor is None:
                continue
            if tensor.dtype not in _DTYPES or not bool(torch.isfinite(tensor).all()):
                raise UserError(f"{side} of {name} has values that are not finite numbers.")


def _alpha_of(pair: Pair, use_rslora: bool) -> float:
    """The numerator from which reading computes the very same scale."""
    near = pair.scale / scale_of(pair.rank, 1.0, use_rslora)
    below, above = math.nextafter(near, -math.inf), math.nextafter(near, math.inf)
    candidates = (float(round(near)), near, below, above)
    exact = (c for c in candidates if scale_of(pair.rank, c, use_rslora) == pair.scale)
    return _whole(next(exact, near))


def _whole(number: float) -> float:
    return int(number) if float(number).is_integer() else number
