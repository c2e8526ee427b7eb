"""The legacy configurations: per-layer lists (dialect A) and scalars (dialect B).

Both count half-layers: even ones attend, odd ones hold experts. Several keys say the same thing;
all that are there must agree, since nothing else shows which of them a file's author meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from openzaya.checkpoint.shared_config import (
    FIXED,
    THETAS,
    check_switches,
    rope_tables,
    whole,
)
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

_WRITTEN_SWITCHES = {
    "A": ("cca", "zaya_use_mod", "zaya_use_eda", "scale_residual_merge", "gated_linear_unit"),
    "B": tuple(
        name
        for name in FIXED
        if name not in ("moe_router_topk", "num_experts_per_tok", "hidden_act")
    ),
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
    check_switches(data, where)
    source = _Source(data, where)
    halves, listed = source.layers()
    lists = [name for name in (*_LAYERS, *_LISTS) if isinstance(data.get(name), list)]
    fields = {name: data[name] for name in _SAME_NAME if name in data}
    heads = "cca_num_q_heads" if "cca_num_q_heads" in data else "num_attention_heads"
    gate_up = source.one(
        "width of gate and up together", ("ffn_hidden_size", "ffn_hidden_size_list"), 1
    )
    gate_up = whole(gate_up, "ffn_hidden_size", where)
    if gate_up % 2:
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
        "partial_rotary_factor": source.rotary_factor(),
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
        data, found = self.data, [name for name in _LAYERS if name in self.data]
        if not found:
            depth = whole(data.get("num_hidden_layers"), "num_hidden_layers", self.where)
            if depth < 2 or depth % 2:
                raise self.refuse(
                    f"num_hidden_layers is {depth}; the key {marker(data)!r} makes this a legacy "
                    "configuration, which counts attention and expert halves, so it must be even"
                )
            self.depth = depth
            return depth, []
        name = self.depth_key = found[0]
        layers = data[name]
        if not isinstance(layers, list) or not layers or len(layers) % 2:
            raise self.refuse(f"{name} must be a list of 'a' and expert counts by turns")
        if layers != data[found[-1]]:
            raise self.refuse(f"{found[0]} and {found[-1]} disagree")
        for number, item in enumerate(layers):
            fits = item == "a" if number % 2 == 0 else type(item) is int and item > 0
            if not fits:
                wanted = "'a' (attention)" if number % 2 == 0 else "a number of experts"
                raise self.refuse(f"{name}[{number}] is {item!r}, where {wanted} belongs")
        different = next((count for count in layers[1::2] if count != layers[1]), None)
        if different is not None:
            raise self.refuse(f"{name} has layers of {layers[1]} and of {different} experts")
        self.depth = len(layers)
        return self.depth, [(name, layers[1])]

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
        if heads == "num_attention_heads" or "num_attention_heads" not in self.data:
            raise self.refuse("the head width is missing (head_dim or kv_channels)")
        full = whole(self.data["num_attention_heads"], "num_attention_heads", self.where)
        width = whole(self.data.get("hidden_size"), "hidden_size", self.where)
        if full < 1 or width % full:
            raise self.refuse(f"hidden_size {width} is no multiple of num_attention_heads {full}")
        return width // full

    def rotary_factor(self) -> Any:
        """Share of each head that RoPE turns, by whichever keys say so."""
        tables = rope_tables(self.data, self.where)
        known = [
            (f"rope_parameters {kind}".strip(), table["partial_rotary_factor"])
            for kind, table in tables.items()
            if "partial_rotary_factor" in table
        ]
        if not known and "partial_rotary_factor" not in self.data:
            return 0.5
        return self.one("rotary factor", ("partial_rotary_factor",), 0, known)

    def sliding(self) -> dict[str, Any]:
        """Window and layer types; legacy windows do not count the query itself, native ones do."""
        data = self.data
        windows = data.get("swa_layers")
        theta = {"sliding_rope_theta": data.get("swa_rotary_base", _SLIDING_THETA)}
        if windows is not None:
            if not isinstance(windows, list) or len(windows) < self.depth:
                raise self.refuse(
                    f"swa_layers must have {self.depth} entries, as {self.depth_key} says"
                )
            windows = [whole(size, "an entry of swa_layers", self.where) for size in windows]
        if windows is None or not any(windows):
            if data.get("sliding_window"):
                raise self.refuse(
                    f"sliding_window is {data['sliding_window']!r}, but no swa_layers say which "
                    "layers slide"
                )
            return theta
        own = windows[: self.depth : 2]
        sizes = sorted({size for size in windows if size})
        if len(sizes) != 1 or sizes[0] < 0:
            raise self.refuse(f"swa_layers holds windows of {sizes}; only one size is implemented")
        if any(windows[1 : self.depth : 2]):
            raise self.refuse(
                "swa_layers has a window for an expert half, which attends to nothing"
            )
        return {
            "layer_types": ["hybrid_sliding" if size else "hybrid" for size in own],
            "sliding_window": sizes[0] + 1 if any(own) else None,
            **theta,
        }


def check_native_keys(data: dict[str, Any], config: ModelConfig, where: str) -> None:
    """Native keys beside legacy ones must say the same.

    Raises:
        UserError: naming the two facts that disagree.
    """
    fields = config.model_dump(mode="json")
    says = {
        "moe_intermediate_size": config.moe_intermediate_size,
        "router_hidden_size": config.router_hidden_size,
        "rms_norm_eps": config.rms_norm_eps,
        "layer_types": list(config.types),
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
    for kind, table in rope_tables(data, where).items():
        name = THETAS[kind] if kind else "rope_theta"
        used = kind != "hybrid_sliding" or "hybrid_sliding" in config.types
        if used and table.get("rope_theta", fields[name]) != fields[name]:
            raise UserError(
                f"{where}: the RoPE base is {fields[name]!r} by the legacy keys, but "
                f"rope_parameters says {table['rope_theta']!r}."
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
        **{name: FIXED[name] for name in _WRITTEN_SWITCHES[dialect]},
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
