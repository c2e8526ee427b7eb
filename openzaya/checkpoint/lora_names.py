"""What PEFT's settings of an adapter mean, and which matrix of the model each name is.

See `lora.py` for the files.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from openzaya.checkpoint.tensors import Entry, Layout, canonical, entries, has_layout
from openzaya.errors import UserError
from openzaya.model.config import ModelConfig
from openzaya.model.lora import kind_of, refusal

CONFIG = "adapter_config.json"

STACKS_SINCE = (0, 19, 1)
"""First version of PEFT that stores expert stacks as it does now."""

_UNSUPPORTED = (
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "trainable_token_indices",
    "layer_replication",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)
"""Settings that change what is computed, and that we implement switched off only."""

_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""Initialisations of the factors that leave the base weights as they are."""


class Settings(BaseModel):
    """What adapter_config.json says, as far as it matters; defaults are PEFT's."""

    model_config = ConfigDict(strict=True, frozen=True)

    r: int = Field(8, gt=0)
    lora_alpha: float = Field(8, allow_inf_nan=False)
    rank_pattern: dict[str, Annotated[int, Field(gt=0)]] = {}
    alpha_pattern: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}
    use_rslora: bool = False
    use_dora: bool = False
    target_modules: list[str] | str = []
    target_parameters: list[str] = []
    exclude_modules: list[str] | str = []
    layers_to_transform: list[int] | int = []
    base_model_name_or_path: str | None = None
    peft_version: str | None = None

    def rank(self, name: str) -> int:
        """Rank of the module or parameter of that name."""
        return _by_pattern(self.rank_pattern, name, self.r)

    def alpha(self, name: str) -> float:
        """Numerator of its scale."""
        return _by_pattern(self.alpha_pattern, name, self.lora_alpha)


def read_settings(file: Path) -> Settings:
    """Open adapter_config.json.

    Raises:
        UserError: naming the key, if something is missing, damaged, or not implemented.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{file.parent} is no adapter: it has no {CONFIG}.") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is damaged and cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise UserError(f"{file} holds no table of settings.")
    data = {name: value for name, value in data.items() if value is not None}
    if data.get("peft_type") != "LORA":
        raise UserError(f"{file}: peft_type is {data.get('peft_type')!r}; only 'LORA' is known.")
    on = [name for name in _UNSUPPORTED if data.get(name)]
    on += ["bias"] if data.get("bias", "none") != "none" else []
    if on:
        raise UserError(f"{file}: {on[0]} is {data[on[0]]!r}, which is not implemented.")
    start = data.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise UserError(
            f"{file}: init_lora_weights is {start!r}, which changed the base weights; convert the "
            "adapter with PEFT's path_initial_model_for_weight_conversion."
        )
    try:
        settings = Settings.model_validate(data)
        patterns = {**settings.rank_pattern, **settings.alpha_pattern}
        for pattern in patterns:
            re.compile(pattern)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        raise UserError(f"{file}: {key}: {problem['msg']}") from error
    except re.error as error:
        raise UserError(f"{file}: {error.pattern!r} is no regular expression: {error}") from error
    return settings


def _by_pattern(patterns: dict[str, Any], name: str, default: Any) -> Any:
    """PEFT's rule: the first pattern that matches the name or its end at a dot."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default


def check_version(version: str | None, square: bool, key: str, where: str) -> None:
    """Refuse the transposed stacks of older PEFT, which a square matrix does not betray."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version or "")[:3])
    if numbers < STACKS_SINCE and (version is not None or square):
        wanted = ".".join(map(str, STACKS_SINCE))
        raise UserError(
            f"{where}: {key}: PEFT before {wanted} stored expert stacks transposed, and "
            f"peft_version in {CONFIG} is {version!r}; save the adapter with {wanted} or later."
        )


@dataclass(frozen=True)
class Place:
    """Where a stored pair belongs.

    Attributes:
        entry: its logical tensor.
        expert: the one expert that it is for, or None.
        target: name that the settings know it by.
    """

    entry: Entry
    expert: int | None
    target: str


class Names:
    """What the names of a file may be, by the table of tensors."""

    def __init__(self, config: ModelConfig) -> None:
        self.layouts: list[Layout] = ["native"]
        if has_layout(config, "legacy"):
            self.layouts.append("legacy")
        self.linear: dict[Layout, dict[str, Place]] = {"native": {}, "legacy": {}}
        self.stacks: dict[str, list[Entry]] = defaultdict(list)
        for entry in entries(config):
            if entry.row.stacked:
                self.stacks[entry.native.rpartition(".")[0]].append(entry)
            for layout in self.layouts:
                for i, name in enumerate(entry.names(layout)):
                    module, _, last = name.rpartition(".")
                    if last == "weight":
                        expert = i if entry.row.stacked else None
                        self.linear[layout][module] = Place(entry, expert, module)

    def guess(self, modules: set[str]) -> Layout | None:
        """The layout that knows most of a file's modules.

        None if both know all, as different ones: the output projections of some blocks may be
        called like those of others.
        """
        unknown = {
            layout: [
                module
                for module in modules
                if _spelled(module, layout) not in self.linear[layout]
                and not (layout == "native" and module in self.stacks)
            ]
            for layout in self.layouts
        }
        if len(self.layouts) > 1 and not any(unknown.values()):
            native, legacy = (self.linear[layout] for layout in self.layouts)
            if any(native[m].entry.native != legacy[m].entry.native for m in modules):
                return None
        return min(self.layouts, key=lambda layout: len(unknown[layout]))

    def place(
        self, layout: Layout, match: re.Match[str], parameters: set[str], where: str
    ) -> Place:
        """What the pair of a name adapts; `parameters` are the targets that are no modules.

        Raises:
            UserError: if the model has no such matrix, or it cannot be adapted.
        """
        module, depth = match["module"], match["nesting"].count(".base_layer")
        place = self.linear[layout].get(_spelled(module, layout))
        if layout == "native" and module in self.stacks:
            for entry in self.stacks[module]:
                listed = [e.native for e in self.stacks[module] if _is_listed(e.native, parameters)]
                if entry.native in listed and wrapping_depth(entry.native, listed) == depth:
                    return Place(entry, None, entry.native)
            raise UserError(
                f"{where}: {match[0]}: target_parameters of {CONFIG} does not say which matrix of "
                "the experts this is."
            )
        if place is None or depth:
            raise UserError(f"{where}: {match[0]} is unknown: the model has no such matrix.")
        if kind_of(place.entry.native) is None:
            raise UserError(f"{where}: {refusal(match[0])}")
        weight = f"{module}.weight"
        return replace(place, target=weight if _is_listed(weight, parameters) else module)


def _spelled(module: str, layout: Layout) -> str:
    weight = f"{module}.weight"
    return (canonical(weight) if layout == "legacy" else weight).removesuffix(".weight")


def _endings(name: str) -> set[str]:
    """A name and its ends at a dot."""
    parts = name.split(".")
    return {".".join(parts[i:]) for i in range(len(parts))}


def _is_listed(name: str, targets: Iterable[str]) -> bool:
    """PEFT's rule: a target is a name or its end at a dot."""
    return not _endings(name).isdisjoint(targets)


def wrapping_depth(name: str, adapted: Iterable[str]) -> int:
    """How many `base_layer` the names of an adapted stack have.

    PEFT wraps the adapted parameters of a module in the order in which the module has them, each
    around those before, so the last one is outermost. With experts that is the down projection.
    """
    module, _, parameter = name.rpartition(".")
    return int(parameter == "gate_up_proj" and f"{module}.down_proj" in adapted)


def check_targets(
    settings: Settings, found: set[str], names: Names, layout: Layout, where: str
) -> None:
    """Whatever the settings list is in the file, in all layers unless they choose some.

    Args:
        found: targets that the file has, as it spells them.

    Raises:
        UserError: naming the target that is missing.
    """
    modules = set(settings.target_modules if isinstance(settings.target_modules, list) else [])
    parameters = set(settings.target_parameters)
    if settings.exclude_modules:
        return
    adapted = {ending for name in found for ending in _endings(name)}
    for target in sorted(modules | parameters):
        if target not in adapted:
            raise UserError(
                f"{where} has no matrices for {target!r}, which is a target by {CONFIG}. Either "
                "the file is incomplete or the adapter was made for another model."
            )
    wanted = [
        entry.native
        for stack in names.stacks.values()
        for entry in stack
        if layout == "native" and _is_listed(entry.native, parameters)
    ]
    if settings.layers_to_transform == []:  # PEFT chooses modules by it, not parameters
        wanted += [
            module
            for module, place in names.linear[layout].items()
            if kind_of(place.entry.native) and _is_listed(module, modules)
        ]
    spelled = found | {_spelled(name, "legacy") for name in found}
    for name in wanted:
        if name not in spelled:
            raise UserError(f"{where} has no matrices for {name}, a target by {CONFIG}.")
