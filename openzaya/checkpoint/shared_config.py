"""What both native and legacy configurations may hold, and how it is read in either."""

from __future__ import annotations

from typing import Any

from openzaya.errors import UserError

FIXED: dict[str, Any] = {
    "num_experts_per_tok": 1,
    "moe_router_topk": 1,
    "hidden_act": "silu",
    "cca": True,
    "zaya_use_mod": True,
    "zaya_use_eda": True,
    "scale_residual_merge": True,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "attention_bias": False,
    "lm_head_bias": False,
    "clamp_temp": False,
    "attention_dropout": 0.0,
    "normalization": "RMSNorm",
}
"""Switches that are implemented with this value only."""

_HINTS = {"clamp_temp": " (keys times exp of a clamped temperature)"}
_ACTIVATIONS = ("silu", "swiglu")

THETAS = {"hybrid": "rope_theta", "hybrid_sliding": "sliding_rope_theta"}
"""Our field for the RoPE base of each layer type."""


def check_switches(data: dict[str, Any], where: str) -> None:
    """Refuse what is not implemented.

    Raises:
        UserError: naming the key and its value.
    """
    for name, value in FIXED.items():
        if data.get(name, value) != value:
            raise UserError(
                f"{where}: {name} is {data[name]!r}{_HINTS.get(name, '')}; only {value!r} is "
                "implemented."
            )
    activation = data.get("activation_func", "swiglu")
    if str(activation).lower() not in _ACTIVATIONS:
        raise UserError(
            f"{where}: activation_func is {activation!r}; only 'swiglu' is implemented."
        )
    if data.get("quantization_config"):
        raise UserError(
            f"{where}: 'quantization_config' says that the weights are quantised; only "
            "unquantised checkpoints can be opened."
        )
    if data.get("rope_scaling"):  # false is how legacy configurations say none
        raise UserError(f"{where}: rope_scaling {data['rope_scaling']!r} is not implemented.")


def rope_tables(data: dict[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """`rope_parameters` as one table per layer type; a flat one goes by the name "".

    A stray `rope_type` beside nested tables, as published, is dropped.

    Raises:
        UserError: if it is no table, or holds a kind of RoPE that is not implemented.
    """
    rope = data.get("rope_parameters", {})
    if not isinstance(rope, dict):
        raise UserError(f"{where}: rope_parameters is {rope!r}, not a table.")
    nested = {kind: rope[kind] for kind in THETAS if isinstance(rope.get(kind), dict)}
    tables = nested or ({"": rope} if rope else {})
    for kind, table in tables.items():
        of = f" of {kind}" if kind else ""
        for key in ("rope_type", "type"):
            if table.get(key, "default") != "default":
                raise UserError(f"{where}: {key} {table[key]!r}{of} is not implemented.")
        for key, value in table.items():
            if "factor" in key and key != "partial_rotary_factor" and value is not None:
                raise UserError(
                    f"{where}: rope_parameters{of} has {key} {value!r}, which is not implemented."
                )
    return tables


def whole(value: Any, name: str, where: str) -> int:
    """A whole number, however JSON spells it.

    Raises:
        UserError: if it is none.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int:
        raise UserError(f"{where}: {name} is {value!r}; it must be a whole number.")
    return value
