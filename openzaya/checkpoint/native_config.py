"""The native configuration (dialect C): one entry per block, what `transformers` reads."""

from __future__ import annotations

from typing import Any

from openzaya.errors import UserError
from openzaya.model.config import ModelConfig

_SAME_NAME = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "cca_time0",
    "cca_time1",
    "sliding_window",
    "max_position_embeddings",
    "num_experts",
    "moe_intermediate_size",
    "router_hidden_size",
    "rms_norm_eps",
    "tie_word_embeddings",
    "initializer_range",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)
"""Fields that the native configuration has under our name."""

_FIXED = {
    "num_experts_per_tok": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "lm_head_bias": False,
    "attention_dropout": 0.0,
    "clamp_temp": False,
}
"""Native switches and leftover legacy flags that we implement with this value only."""

_WRITTEN_FIXED = ("num_experts_per_tok", "hidden_act", "attention_bias", "lm_head_bias")

THETAS = {"hybrid": "rope_theta", "hybrid_sliding": "sliding_rope_theta"}
"""Our field for the RoPE base of each layer type."""


def read(data: dict[str, Any], where: str) -> dict[str, Any]:
    """Fields of a `ModelConfig`.

    Raises:
        UserError: for a switch that is not implemented, or RoPE settings in another form.
    """
    if data.get("quantization_config"):
        raise UserError(
            f"{where}: 'quantization_config' says that the weights are quantised; only "
            "unquantised checkpoints can be opened."
        )
    for name, value in _FIXED.items():
        if data.get(name, value) != value:
            raise UserError(f"{where}: {name} is {data[name]!r}; only {value!r} is implemented.")
    if data.get("rope_scaling"):  # false is how some say none
        raise UserError(f"{where}: rope_scaling {data['rope_scaling']!r} is not implemented.")
    fields = {name: data[name] for name in (*_SAME_NAME, "layer_types") if name in data}
    types = data.get("layer_types", ["hybrid"])
    return {**fields, **_rope_fields(data.get("rope_parameters"), types, where)}


def write(config: ModelConfig, dialect: str) -> dict[str, Any]:
    """The content of config.json, but for what all dialects share."""
    fields = config.model_dump(mode="json")
    if "hybrid_sliding" not in config.types:
        fields["sliding_window"] = None
    rope = {
        layer_type: {
            "rope_type": "default",
            "rope_theta": fields[theta],
            "partial_rotary_factor": config.partial_rotary_factor,
        }
        for layer_type, theta in THETAS.items()
    }
    return {
        "model_type": "zaya",
        "architectures": ["ZayaForCausalLM"],
        **{name: fields[name] for name in _SAME_NAME},
        "layer_types": list(config.types),
        "rope_parameters": rope,
        **{name: _FIXED[name] for name in _WRITTEN_FIXED},
    }


def _rope_fields(rope: Any, types: Any, where: str) -> dict[str, float]:
    """RoPE settings of the nested form; a stray top-level `rope_type` is dropped.

    Layers of a type that the model has must have an entry; without any settings the native
    defaults hold.
    """
    if rope is None:
        return {}
    fields: dict[str, float] = {}
    for layer_type, name in THETAS.items():
        entry = rope.get(layer_type) if isinstance(rope, dict) else None
        used = isinstance(types, list | tuple) and layer_type in types
        if not used:
            if isinstance(entry, dict) and "rope_theta" in entry:
                fields[name] = entry["rope_theta"]
            continue
        if not isinstance(entry, dict):
            raise UserError(
                f"{where}: rope_parameters has no entry for the layer type {layer_type!r}; "
                "the native dialect has one table per layer type."
            )
        if entry.get("rope_type", "default") != "default":
            raise UserError(
                f"{where}: rope_type {entry['rope_type']!r} of {layer_type} is not implemented."
            )
        if "rope_theta" in entry:
            fields[name] = entry["rope_theta"]
        factor = entry.get("partial_rotary_factor", 1.0)
        if fields.setdefault("partial_rotary_factor", factor) != factor:
            raise UserError(f"{where}: layer types disagree about partial_rotary_factor.")
    return fields
