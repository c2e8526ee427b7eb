"""The native configuration (dialect C): one entry per block, what `transformers` reads."""

from __future__ import annotations

from typing import Any

from openzaya.checkpoint.shared_config import FIXED, THETAS, check_switches, rope_tables
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

_WRITTEN_FIXED = ("num_experts_per_tok", "hidden_act", "attention_bias", "lm_head_bias")


def read(data: dict[str, Any], where: str) -> dict[str, Any]:
    """Fields of a `ModelConfig`.

    Raises:
        UserError: for a switch that is not implemented, or RoPE settings in another form.
    """
    check_switches(data, where)
    head_dim, channels = data.get("head_dim"), data.get("kv_channels")
    if channels not in (None, head_dim):
        raise UserError(f"{where}: head_dim is {head_dim!r}, but kv_channels says {channels!r}.")
    fields = {name: data[name] for name in (*_SAME_NAME, "layer_types") if name in data}
    types = data.get("layer_types", ["hybrid"])
    return {**fields, **_rope_fields(data, types, where)}


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
        **{name: FIXED[name] for name in _WRITTEN_FIXED},
    }


def _rope_fields(data: dict[str, Any], types: Any, where: str) -> dict[str, Any]:
    """RoPE settings of the nested form.

    Layers of a type that the model has must have an entry; without any settings the native
    defaults hold.
    """
    tables = rope_tables(data, where)
    fields: dict[str, Any] = {}
    for layer_type, name in THETAS.items():
        table = tables.get(layer_type)
        used = isinstance(types, list | tuple) and layer_type in types
        if used and table is None and "rope_parameters" in data:
            raise UserError(
                f"{where}: rope_parameters has no entry for the layer type {layer_type!r}; "
                "the native dialect has one table per layer type."
            )
        if table is None:
            continue
        if "rope_theta" in table:
            fields[name] = table["rope_theta"]
        factor = table.get("partial_rotary_factor", 1.0)
        if used and fields.setdefault("partial_rotary_factor", factor) != factor:
            raise UserError(f"{where}: layer types disagree about partial_rotary_factor.")
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in data and fields.get(name, data[name]) != data[name]:
            raise UserError(
                f"{where}: {name} is {data[name]!r}, but rope_parameters says {fields[name]!r}."
            )
        if name in data and name not in fields:
            raise UserError(
                f"{where}: {name} stands at the top, where native readers do not look; it belongs "
                "into rope_parameters, one table per layer type."
            )
    return fields
