"""The one table of tensors: what each is called, shaped and stored as, in every dialect.

There are two layouts. The *native* one (dialect C) has a block of attention and experts per layer
number, with expert matrices stacked; the *legacy* one (dialects A and B) numbers the halves, h = 2b
for attention and h = 2b + 1 for experts, and stores every expert by itself. Values are the same
and nothing is ever transposed, so a native tensor is its legacy parts one after the other.

A residual scale belongs to the *end* of a half in the native layout and to the *beginning* of the
next half in the legacy one; `{next}` below is that half, or the model's end after the last block.

Everything that reads, writes, checks, counts or documents tensors does so by this table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from openzaya.model.config import ModelConfig
from openzaya.model.precision import keeps_fp32

Layout = Literal["native", "legacy"]

DIMS: dict[str, tuple[str, Callable[[ModelConfig], int]]] = {
    "V": ("vocab_size", lambda c: c.vocab_size),
    "E": ("hidden_size", lambda c: c.hidden_size),
    "Q": ("num_attention_heads * head_dim", lambda c: c.query_width),
    "K": ("num_key_value_heads * head_dim", lambda c: c.key_width),
    "K/2": ("num_key_value_heads * head_dim / 2", lambda c: c.key_width // 2),
    "C": ("(num_attention_heads + num_key_value_heads) * head_dim", lambda c: c.conv_channels),
    "D": ("head_dim", lambda c: c.head_dim),
    "G": ("num_key_value_heads", lambda c: c.num_key_value_heads),
    "T0": ("cca_time0", lambda c: c.cca_time0),
    "T1": ("cca_time1", lambda c: c.cca_time1),
    "R": ("router_hidden_size", lambda c: c.router_hidden_size),
    "N": ("experts and the skip class", lambda c: c.num_router_classes),
    "X": ("num_experts", lambda c: c.num_experts),
    "I": ("moe_intermediate_size", lambda c: c.moe_intermediate_size),
    "2I": ("2 * moe_intermediate_size, gate rows first", lambda c: 2 * c.moe_intermediate_size),
    "1": ("1", lambda c: 1),
}
"""Sizes by the letter that the table uses: what they are, and their value for a configuration."""

_ALIASES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^(model\.layers\.\d+\.self_attn)\.cca\.", r"\1.qkv."),
        (r"^(model\.layers\.\d+)\.(?:moe\.zaya_block|smoe_block)\.", r"\1.zaya_block."),
        (r"^(model\.layers\.\d+)\.(?:moe\.)?(router|experts)\.", r"\1.zaya_block.\2."),
    )
)
"""Spellings of legacy names that converters have used, and the name of the table."""


@dataclass(frozen=True)
class Row:
    """One logical tensor of the table.

    Attributes:
        native: its name in the native layout; `{b}` is the block.
        legacy: its name in the legacy layout, or None if that layout has no such tensor; `{a}`
            and `{m}` are the attention and the expert half of block b, `{next}` what follows
            them, `{e}` an expert.
        shape: sizes of the native tensor, by the letters of `DIMS`.
        present: whether a model has it, in block b (blocks only).
    """

    native: str
    legacy: str | None
    shape: str
    present: Callable[[ModelConfig, int], bool] = lambda config, b: True

    @property
    def dims(self) -> tuple[str, ...]:
        """Letters of the shape."""
        return tuple(self.shape.split())

    @property
    def stacked(self) -> bool:
        """Whether the legacy layout has one tensor per expert."""
        return self.legacy is not None and "{e}" in self.legacy


def _cca(config: ModelConfig, b: int) -> bool:
    return config.attention == "cca"


def _standard(config: ModelConfig, b: int) -> bool:
    return config.attention == "standard"


def _zaya_router(config: ModelConfig, b: int) -> bool:
    return config.router == "zaya"


def _later_zaya_router(config: ModelConfig, b: int) -> bool:
    return config.router == "zaya" and b > 0  # the first router has no state below to average


def _linear_router(config: ModelConfig, b: int) -> bool:
    return config.router == "linear"


def _scaled(config: ModelConfig, b: int) -> bool:
    return config.residual == "scaled"


def _untied(config: ModelConfig, b: int) -> bool:
    return not config.tie_word_embeddings


_QKV = "model.layers.{b}.self_attn.qkv_proj"
_OLD_QKV = "model.layers.{a}.self_attn.qkv"
_GATE = "model.layers.{b}.mlp.gate"
_OLD_GATE = "model.layers.{m}.zaya_block.router"
_SCALES = ("hidden_states_scale", "hidden_states_bias", "residual_scale", "residual_bias")
_EXPERTS = "model.layers.{b}.mlp.experts"
_OLD_EXPERT = "model.layers.{m}.zaya_block.experts.local_experts.{e}"

HEAD_ROWS = (
    Row("model.embed_tokens.weight", "model.embed_tokens.weight", "V E"),
    *(
        Row(
            f"model.input_hidden_states_{part}",
            f"model.layers.0.res_scale.hidden_states_{part}",
            "E",
            _scaled,
        )
        for part in ("scale", "bias")
    ),
)
BLOCK_ROWS = (
    Row("model.layers.{b}.input_layernorm.weight", "model.layers.{a}.input_norm.weight", "E"),
    Row(f"{_QKV}.q_proj.weight", f"{_OLD_QKV}.linear_q.weight", "Q E", _cca),
    Row(f"{_QKV}.k_proj.weight", f"{_OLD_QKV}.linear_k.weight", "K E", _cca),
    Row(f"{_QKV}.v_proj_current.weight", f"{_OLD_QKV}.val_proj1.weight", "K/2 E", _cca),
    Row(f"{_QKV}.v_proj_delayed.weight", f"{_OLD_QKV}.val_proj2.weight", "K/2 E", _cca),
    Row(f"{_QKV}.conv_qk_depthwise.weight", f"{_OLD_QKV}.conv_qk.0.weight", "C 1 T0", _cca),
    Row(f"{_QKV}.conv_qk_depthwise.bias", f"{_OLD_QKV}.conv_qk.0.bias", "C", _cca),
    Row(f"{_QKV}.conv_qk_grouped.weight", f"{_OLD_QKV}.conv_qk.1.weight", "C D T1", _cca),
    Row(f"{_QKV}.conv_qk_grouped.bias", f"{_OLD_QKV}.conv_qk.1.bias", "C", _cca),
    Row("model.layers.{b}.self_attn.qk_norm.temp", f"{_OLD_QKV}.temp", "G", _cca),
    Row("model.layers.{b}.self_attn.q_proj.weight", None, "Q E", _standard),
    Row("model.layers.{b}.self_attn.k_proj.weight", None, "K E", _standard),
    Row("model.layers.{b}.self_attn.v_proj.weight", None, "K E", _standard),
    Row(
        "model.layers.{b}.self_attn.o_proj.weight",
        "model.layers.{a}.self_attn.o_proj.weight",
        "E Q",
    ),
    *(
        Row(
            f"model.layers.{{b}}.post_attention_residual_scale.{part}",
            f"model.layers.{{m}}.res_scale.{part}",
            "E",
            _scaled,
        )
        for part in _SCALES
    ),
    Row(
        "model.layers.{b}.post_attention_layernorm.weight",
        "model.layers.{m}.input_norm.weight",
        "E",
    ),
    Row(f"{_GATE}.down_proj.weight", f"{_OLD_GATE}.down_proj.weight", "R E", _zaya_router),
    Row(f"{_GATE}.down_proj.bias", f"{_OLD_GATE}.down_proj.bias", "R", _zaya_router),
    Row(
        f"{_GATE}.router_states_scale", f"{_OLD_GATE}.router_states_scale", "R", _later_zaya_router
    ),
    Row(f"{_GATE}.router_mlp.norm.weight", f"{_OLD_GATE}.rmsnorm_eda.weight", "R", _zaya_router),
    Row(f"{_GATE}.router_mlp.fc1.weight", f"{_OLD_GATE}.router_mlp.0.weight", "R R", _zaya_router),
    Row(f"{_GATE}.router_mlp.fc1.bias", f"{_OLD_GATE}.router_mlp.0.bias", "R", _zaya_router),
    Row(f"{_GATE}.router_mlp.fc2.weight", f"{_OLD_GATE}.router_mlp.2.weight", "R R", _zaya_router),
    Row(f"{_GATE}.router_mlp.fc2.bias", f"{_OLD_GATE}.router_mlp.2.bias", "R", _zaya_router),
    Row(
        f"{_GATE}.router_mlp.out_proj.weight",
        f"{_OLD_GATE}.router_mlp.4.weight",
        "N R",
        _zaya_router,
    ),
    Row(f"{_GATE}.out_proj.weight", None, "N E", _linear_router),
    Row(f"{_GATE}.balancing_biases", f"{_OLD_GATE}.balancing_biases", "N"),
    Row(f"{_EXPERTS}.gate_up_proj", f"{_OLD_EXPERT}.linear_fc1.weight", "X 2I E"),
    Row(f"{_EXPERTS}.down_proj", f"{_OLD_EXPERT}.linear_fc2.weight", "X E I"),
    *(
        Row(
            f"model.layers.{{b}}.post_mlp_residual_scale.{part}",
            f"model.{{next}}res_scale.{part}",
            "E",
            _scaled,
        )
        for part in _SCALES
    ),
)
TAIL_ROWS = (
    Row("model.norm.weight", "model.final_norm.weight", "E"),
    Row("lm_head.weight", "lm_head.weight", "V E", _untied),
)
TABLE = (*HEAD_ROWS, *BLOCK_ROWS, *TAIL_ROWS)

# Which stored dtypes a tensor may have. Matrices of one checkpoint share one; whatever stays fp32
# in computation may also be stored so; balancing biases decide between near ties and must be.
MATRIX_DTYPES = ("BF16", "F32", "F16")
BIASES_DTYPE = "F32"


@dataclass(frozen=True)
class Entry:
    """A tensor of one particular model.

    Attributes:
        row: of the table.
        block: number of the block, or None.
        native: its name in the native layout, which is its logical name.
        legacy: names of its parts in the legacy layout, in stacking order; none where that layout
            has no such tensor.
        shape: of the native tensor.
    """

    row: Row
    block: int | None
    native: str
    legacy: tuple[str, ...]
    shape: tuple[int, ...]

    def names(self, layout: Layout) -> tuple[str, ...]:
        """Stored tensors that make it up, in order."""
        return (self.native,) if layout == "native" else self.legacy

    def part_shape(self, layout: Layout) -> tuple[int, ...]:
        """Shape of each of them."""
        return self.shape[1:] if layout == "legacy" and self.row.stacked else self.shape

    def part_dims(self, layout: Layout) -> tuple[str, ...]:
        """Letters of that shape."""
        return self.row.dims[1:] if layout == "legacy" and self.row.stacked else self.row.dims

    @property
    def numel(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)

    @property
    def is_biases(self) -> bool:
        """Whether it is the balancing controller's, and no parameter."""
        return self.native.endswith("balancing_biases")

    @cached_property
    def is_matrix(self) -> bool:
        """Whether it may be computed with in less than fp32 (`model/precision.py`)."""
        return not keeps_fp32(self.native)


def entries(config: ModelConfig) -> list[Entry]:
    """All tensors of a model, in the order in which a forward needs them."""
    blocks = range(config.num_hidden_layers)
    found = [_entry(row, config, None) for row in HEAD_ROWS if row.present(config, 0)]
    found += [
        _entry(row, config, b) for b in blocks for row in BLOCK_ROWS if row.present(config, b)
    ]
    found += [_entry(row, config, None) for row in TAIL_ROWS if row.present(config, 0)]
    return found


def _entry(row: Row, config: ModelConfig, block: int | None) -> Entry:
    b = block or 0
    following = f"layers.{2 * b + 2}." if b + 1 < config.num_hidden_layers else ""
    fill = {"b": b, "a": 2 * b, "m": 2 * b + 1, "next": following}
    if row.legacy is None:
        legacy: tuple[str, ...] = ()
    elif row.stacked:
        legacy = tuple(row.legacy.format(**fill, e=e) for e in range(config.num_experts))
    else:
        legacy = (row.legacy.format(**fill),)
    shape = tuple(DIMS[dim][1](config) for dim in row.dims)
    return Entry(row, block, row.native.format(**fill), legacy, shape)


def has_layout(config: ModelConfig, layout: Layout) -> bool:
    """Whether the layout has names for everything that the model has."""
    return layout == "native" or all(entry.legacy for entry in entries(config))


def tensor_count(config: ModelConfig, layout: Layout) -> int:
    """Stored tensors of a checkpoint: 1283 native and 2483 legacy for ZAYA1-8B."""
    return sum(len(entry.names(layout)) for entry in entries(config))


def parameter_count(config: ModelConfig) -> int:
    """Parameters with embeddings, balancing biases not counted: 8.840e9 for ZAYA1-8B."""
    return sum(entry.numel for entry in entries(config) if not entry.is_biases)


def canonical(name: str) -> str:
    """The table's spelling of a legacy name that converters spell otherwise."""
    for pattern, replacement in _ALIASES:
        name = pattern.sub(replacement, name)
    return name


def explain(dims: Iterable[str], config: ModelConfig) -> str:
    """Where a shape comes from: "num_attention_heads * head_dim = 1024 by hidden_size = 2048"."""
    parts = (f"{DIMS[dim][0]} = {DIMS[dim][1](config)}" for dim in dims if dim != "1")
    return " by ".join(parts)


def guess_layout(names: Iterable[str]) -> tuple[Layout, str] | None:
    """Which layout the names of a checkpoint are in, with the name that shows it."""
    native = {_pattern(row.native) for row in BLOCK_ROWS}
    legacy = {_pattern(row.legacy) for row in BLOCK_ROWS if row.legacy is not None}
    native, legacy = native - legacy, legacy - native  # both have an o_proj
    for name in names:
        if any(pattern.fullmatch(name) for pattern in native):
            return "native", name
        if any(pattern.fullmatch(canonical(name)) for pattern in legacy):
            return "legacy", name
    return None


def depth_of(names: Iterable[str]) -> int:
    """One more than the highest layer number in any name (half-layers in the legacy layout)."""
    return _highest(r"model\.layers\.(\d{1,9})\.", names)


def experts_of(names: Iterable[str]) -> int:
    """One more than the highest expert number in any legacy name."""
    return _highest(r"model\.layers\.\d{1,9}\.[a-z_.]*local_experts\.(\d{1,9})\.", names)


def _highest(pattern: str, names: Iterable[str]) -> int:
    matches = (re.match(pattern, name) for name in names)
    return max((int(match[1]) + 1 for match in matches if match), default=0)


def _pattern(template: str) -> re.Pattern[str]:
    escaped = re.escape(template).replace(re.escape("{next}"), r"(?:layers\.\d+\.)?")
    return re.compile(re.sub(r"\\\{[abme]\\\}", r"\\d+", escaped))


def markdown() -> Iterator[str]:
    """Lines of the table as Markdown, for `docs/formats.md`."""
    yield "| native (C) | legacy (A, B) | shape | only where |"
    yield "|---|---|---|---|"
    for row in TABLE:
        legacy = "-" if row.legacy is None else f"`{row.legacy}`"
        yield f"| `{row.native}` | {legacy} | {row.shape} | {_WHERE.get(row.present, '')} |"


_WHERE: dict[Callable[[ModelConfig, int], bool], str] = {
    _cca: "",
    _standard: "attention = standard",
    _zaya_router: "",
    _later_zaya_router: "b > 0",
    _linear_router: "router = linear",
    _scaled: "",
    _untied: "embeddings are not tied",
}
