"""The legacy configurations: per-layer lists (dialect A) and scalars (dialect B).

Both count half-layers: even ones attend, odd ones hold experts. Several keys say the same thing;
all that are there must agree, since nothing else shows which of them a file's author meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from openzaya.checkpoint.native_config import THETAS
from openzaya.errors import UserError
from openzaya.model.config import ModelConfig

MODEL_TYPES = ("zaya", "smoe", "bmoe")

_LAYERS = ("zaya_layers", "smoe_layers")
_LISTS = (
    "cca_num_q_heads",
    "num_query_groups_list",
    "ffn_hidden_size_list",
    "zaya_mlp_expansion",
    "smoe_mlp_expansion",
)
_MARKERS = (
    *_LAYERS,
    *_LISTS,
    "ffn_hidden_size",
    "num_query_groups",
    "moe_router_topk",
    "norm_epsilon",
    "swa_layers",
    "rotary_base",
)
"""Keys that only the legacy dialects have."""

_SWITCHES = {
    "moe_router_topk": 1,
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
"""Switches that we implement with this value only."""

_WRITTEN_SWITCHES = {
    "A": ("cca", "zaya_use_mod", "zaya_use_eda", "scale_residual_merge", "gated_linear_unit"),
    "B": tuple(name for name in _SWITCHES if name != "moe_router_topk"),
}

_SLIDING_THETA = 10_000.0

_SAME_NAME = (
    "vocab_size",
    "hidden_size",
    "max_position_embeddings",
    "tie_word_embeddings",
    "initializer_range",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "cca_time0",
    "cca_time1",
    "residual_in_fp32",
)


def marker(data: dict[str, Any]) -> str | None:
    """A key that makes this configuration legacy, if there is one."""
    return next((name for name in _MARKERS if name in data), None)


def read(data: dict[str, Any], where: str) -> tuple[dict[str, Any], Literal["A", "B"]]:
    """Fields of a `ModelConfig`, and the dialect.

    Raises:
        UserError: naming the key, or the two facts, that cannot be right.
    """
    for name, value in _SWITCHES.items():
        if data.get(name, value) != value:
            hint = " (keys times exp of a clamped temperature)" if name == "clamp_temp" else ""
            raise UserError(
                f"{where}: {name} is {data[name]!r}{hint}; only {value!r} is implemented."
            )
    if data.get("quantization_config"):
        raise UserError(
            f"{where}: 'quantization_config' says that the weights are quantised; only "
            "unquantised checkpoints can be opened."
        )
    if data.get("rope_scaling"):  # false is how this dialect says none
        raise UserError(f"{where}: rope_scaling {data['rope_scaling']!r} is not implemented.")
    source = _Source(data, where)
    halves, listed = source.layers()
    lists = [name for name in (*_LAYERS, *_LISTS) if isinstance(data.get(name), list)]
    fields = {name: data[name] for name in _SAME_NAME if name in data}
    heads = "cca_num_q_heads" if "cca_num_q_heads" in data else "num_attention_heads"
    gate_up = source.one(
        "width of gate and up together", ("ffn_hidden_size", "ffn_hidden_size_list"), 1
    )
    if type(gate_up) is not int or gate_up % 2:
        raise UserError(f"{where}: ffn_hidden_size {gate_up} is gate and up together, so even.")
    fields |= {
        "num_hidden_layers": halves // 2,
        "num_attention_heads": source.one("number of query heads", (heads,), 0),
        "num_key_value_heads": source.one(
            "number of key and value heads",
            ("num_query_groups_list", "num_query_groups", "num_key_value_heads"),
            0,
        ),
        "head_dim": source.head_dim(heads),
        "num_experts": source.one("number of experts", ("num_experts",), 1, listed),
        "moe_intermediate_size": gate_up // 2,
        "router_hidden_size": source.one(
            "router width", ("zaya_mlp_expansion", "smoe_mlp_expansion"), 1
        ),
        "rope_theta": source.one("RoPE base", ("rope_theta", "rotary_base"), 0),
        "partial_rotary_factor": data.get("partial_rotary_factor", 0.5),
        "rms_norm_eps": data.get("norm_epsilon", 1e-5),
    }
    fields |= source.sliding()
    return fields, "A" if lists else "B"


class _Source:
    """A legacy configuration being read; half-layer lists collapse once the depth is known."""

    def __init__(self, data: dict[str, Any], where: str) -> None:
        self.data = data
        self.where = where
        self.depth = 0
        self.depth_key = "num_hidden_layers"

    def refuse(self, what: str) -> UserError:
        return UserError(f"{self.where}: {what}.")

    def layers(self) -> tuple[int, list[tuple[str, Any]]]:
        """Half-layers, and what the layer list says about experts."""
        data = self.data
        for name in _LAYERS:
            if name not in data:
                continue
            layers = data[name]
            if not isinstance(layers, list) or not layers or len(layers) % 2:
                raise self.refuse(f"{name} must be a list of 'a' and expert counts by turns")
            counts = layers[1::2]
            for number, item in enumerate(layers):
                fits = item == "a" if number % 2 == 0 else type(item) is int and item > 0
                if not fits:
                    wanted = "'a' (attention)" if number % 2 == 0 else "a number of experts"
                    raise self.refuse(f"{name}[{number}] is {item!r}, where {wanted} belongs")
            if len(set(counts)) > 1:
                raise self.refuse(
                    f"{name} has layers of {counts[0]} and of "
                    f"{next(c for c in counts if c != counts[0])} experts"
                )
            self.depth, self.depth_key = len(layers), name
            return self.depth, [(name, counts[0])]
        depth = data.get("num_hidden_layers")
        if type(depth) is not int or depth < 2 or depth % 2:
            raise self.refuse(
                f"num_hidden_layers is {depth!r}; the key {marker(data)!r} makes this a legacy "
                "configuration, which counts attention and expert halves, so it must be even"
            )
        self.depth = depth
        return depth, []

    def collapse(self, name: str, half: int) -> Any:
        """One value of a key that may hold one per half-layer; zero stands for "not here"."""
        value = self.data[name]
        if not isinstance(value, list):
            return value
        if len(value) < self.depth:
            raise self.refuse(
                f"{name} has {len(value)} entries, but {self.depth_key} says "
                f"{self.depth} half-layers"
            )
        own = value[half : self.depth : 2]
        rest = [item for item in (*value[1 - half : self.depth : 2], *value[self.depth :]) if item]
        different = next((item for item in (*own, *rest) if item != own[0]), None)
        if different is not None or not own[0]:
            raise self.refuse(f"{name} holds both {own[0]!r} and {different!r}")
        return own[0]

    def one(
        self, what: str, names: Sequence[str], half: int, known: Sequence[tuple[str, Any]] = ()
    ) -> Any:
        """The value that all of these keys that are there, and facts known already, agree on."""
        found = [*known, *((n, self.collapse(n, half)) for n in names if n in self.data)]
        if not found:
            raise self.refuse(
                f"the {what} is missing ({' or '.join(names)}); the key {marker(self.data)!r} "
                "makes this a legacy configuration"
            )
        (first, value), *others = found
        for name, other in others:
            if other != value:
                raise self.refuse(
                    f"{first} says that the {what} is {value!r}, but {name} says {other!r}"
                )
        return value

    def head_dim(self, heads: str) -> Any:
        """From its own keys, else from the uncompressed head count where there is one."""
        names = ("head_dim", "kv_channels")
        if any(name in self.data for name in names):
            return self.one("head width", names, 0)
        full = self.data.get("num_attention_heads")
        width = self.data.get("hidden_size")
        if heads == "num_attention_heads" or not full or not width or width % full:
            raise self.refuse("the head width is missing (head_dim or kv_channels)")
        return width // full

    def sliding(self) -> dict[str, Any]:
        """Window and layer types; legacy windows do not count the query itself, native ones do."""
        data = self.data
        windows = data.get("swa_layers")
        if windows is None or not any(_numbers(windows)):
            if data.get("sliding_window"):
                raise self.refuse(
                    f"sliding_window is {data['sliding_window']!r}, but no swa_layers say which "
                    "layers slide"
                )
            return {"sliding_rope_theta": data.get("swa_rotary_base", _SLIDING_THETA)}
        if not isinstance(windows, list) or len(windows) < self.depth:
            raise self.refuse(
                f"swa_layers must have {self.depth} entries, as {self.depth_key} says"
            )
        own = windows[: self.depth : 2]
        sizes = sorted({size for size in own if size})
        if len(sizes) != 1 or type(sizes[0]) is not int:
            raise self.refuse(f"swa_layers holds windows of {sizes}; only one size is implemented")
        return {
            "layer_types": ["hybrid_sliding" if size else "hybrid" for size in own],
            "sliding_window": sizes[0] + 1,
            "sliding_rope_theta": data.get("swa_rotary_base", _SLIDING_THETA),
        }


def _numbers(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def check_native_keys(data: dict[str, Any], config: ModelConfig, where: str) -> None:
    """Native keys beside legacy ones must say the same.

    Raises:
        UserError: naming the two facts that disagree.
    """
    fields = config.model_dump(mode="json")
    says = {
        "moe_intermediate_size": config.moe_intermediate_size,
        "router_hidden_size": config.router_hidden_size,
        "num_experts_per_tok": 1,
        "rms_norm_eps": config.rms_norm_eps,
        "layer_types": list(config.types),
        "hidden_act": "silu",
    }
    if "swa_layers" in data:
        says["sliding_window"] = config.sliding_window
    for name, value in says.items():
        if data.get(name, value) != value:
            raise UserError(
                f"{where}: {marker(data)!r} makes this a legacy configuration, by which {name} "
                f"would be {value!r}, but it says {data[name]!r}. One of the two belongs to "
                "another checkpoint."
            )
    rope = data.get("rope_parameters", {})
    nested = {THETAS[kind]: rope[kind] for kind in THETAS if isinstance(rope.get(kind), dict)}
    for theta, entry in (nested or {"rope_theta": rope}).items():
        used = theta == "rope_theta" or "hybrid_sliding" in config.types
        if used and entry.get("rope_theta", fields[theta]) != fields[theta]:
            raise UserError(
                f"{where}: the RoPE base is {fields[theta]!r} by the legacy keys, but "
                f"rope_parameters says {entry['rope_theta']!r}."
            )


def write(config: ModelConfig, dialect: str) -> dict[str, Any]:
    """The content of config.json, but for what all dialects share.

    Raises:
        UserError: if dialect A is to describe sliding layers.
    """
    fields = config.model_dump(mode="json")
    halves = 2 * config.num_hidden_layers
    slides = "hybrid_sliding" in config.types
    data = {
        "model_type": "zaya",
        "architectures": ["ZayaForCausalLM"],
        **{name: fields[name] for name in _SAME_NAME},
        "num_hidden_layers": halves,
        "num_key_value_heads": config.num_key_value_heads,
        "kv_channels": config.head_dim,
        "moe_router_topk": 1,
        "norm_epsilon": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "partial_rotary_factor": config.partial_rotary_factor,
        **{name: _SWITCHES[name] for name in _WRITTEN_SWITCHES[dialect]},
    }
    if slides or config.sliding_rope_theta != _SLIDING_THETA:
        data["swa_rotary_base"] = config.sliding_rope_theta
    if dialect == "B":
        data |= {
            "num_attention_heads": config.num_attention_heads,
            "num_query_groups": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "num_experts": config.num_experts,
            "ffn_hidden_size": 2 * config.moe_intermediate_size,
            "zaya_mlp_expansion": config.router_hidden_size,
            "zaya_high_prec": True,
            "mamba_cache_dtype": "float32",
        }
        if slides:
            window = (config.sliding_window or 0) - 1
            if window < 1:  # zero stands for full attention
                raise UserError("dialect B has no words for a window of the query alone.")
            sizes = [window * (kind == "hybrid_sliding") for kind in config.types]
            data["swa_layers"] = [entry for size in sizes for entry in (size, 0)]
        return data
    if slides:
        raise UserError("dialect A has no words for sliding layers; write B or C.")

    def per_half(attention: Any, experts: Any) -> list[Any]:
        return [attention, experts] * config.num_hidden_layers

    return data | {
        "zaya_layers": per_half("a", config.num_experts),
        "num_attention_heads": max(1, config.hidden_size // config.head_dim),
        "cca_num_q_heads": per_half(config.num_attention_heads, 0),
        "num_query_groups_list": per_half(config.num_key_value_heads, 0),
        "ffn_hidden_size_list": per_half(0, 2 * config.moe_intermediate_size),
        "zaya_mlp_expansion": per_half(0, config.router_hidden_size),
    }
