"""The one definition of a model's architecture, and the named presets.

Fields carry the names of the native checkpoint dialect (what `transformers` calls `ZayaConfig`)
wherever it has a name for the same thing.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

LayerType = Literal["hybrid", "hybrid_sliding"]


class ModelConfig(BaseModel):
    """Architecture of a ZAYA1-style model, or of one of the classic alternatives beside it.

    One *layer* is an attention block followed by a mixture-of-experts block (ZAYA1-8B has 40 of
    them; its report counts the two halves separately).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    vocab_size: int = Field(gt=0, description="Rows of the embedding, special tokens included.")
    hidden_size: int = Field(gt=0, description="Width E of the residual stream.")
    num_hidden_layers: int = Field(gt=0, le=10_000, description="Layers (attention + experts).")
    num_attention_heads: int = Field(gt=0, description="Query heads, in the latent for CCA.")
    num_key_value_heads: int = Field(gt=0, description="Key and value heads.")
    head_dim: int = Field(gt=1, description="Width of one head.")

    attention: Literal["cca", "standard"] = Field(
        "cca",
        description="Compressed convolutional attention, or plain MHA/GQA for ablations.",
    )
    cca_time0: int = Field(2, ge=1, description="Taps of the depthwise convolution.")
    cca_time1: int = Field(2, ge=1, description="Taps of the per-head (grouped) convolution.")

    layer_types: tuple[LayerType, ...] | None = Field(
        None, description="Full or sliding attention per layer; None means all full."
    )
    sliding_window: int | None = Field(
        None, gt=0, description="Tokens a sliding layer sees, the query itself included."
    )
    rope_theta: float = Field(5_000_000.0, gt=0, description="RoPE base of full layers.")
    sliding_rope_theta: float = Field(10_000.0, gt=0, description="RoPE base of sliding layers.")
    partial_rotary_factor: float = Field(
        0.5, ge=0, le=1, description="Share of each head's channels that RoPE turns."
    )
    max_position_embeddings: int = Field(131_072, gt=0, description="Longest trained context.")

    num_experts: int = Field(
        gt=0, le=10_000, description="SwiGLU experts per layer, skip class excluded."
    )
    moe_intermediate_size: int = Field(gt=0, description="Inner width of one expert.")
    router: Literal["zaya", "linear"] = Field(
        "zaya", description="MLP router with depth averaging, or one linear map for ablations."
    )
    router_hidden_size: int = Field(256, gt=0, description="Width R of the router state.")
    skip_expert: Literal["zero", "identity", "none"] = Field(
        "zero",
        description="What the extra router class adds: nothing, input x probability, or no class.",
    )

    residual: Literal["scaled", "plain"] = Field(
        "scaled", description="Learned residual scaling, or a plain sum for ablations."
    )
    residual_in_fp32: bool = Field(
        True,
        description="False rounds the residual stream to the compute dtype after every sum, as "
        "ZAYA1-base was trained.",
    )
    rms_norm_eps: float = Field(1e-5, gt=0)
    tie_word_embeddings: bool = True
    initializer_range: float = Field(0.02, gt=0, description="Standard deviation of embeddings.")

    pad_token_id: int = 0
    bos_token_id: int = 2
    eos_token_id: int = 106

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.attention == "cca" and (self.num_key_value_heads * self.head_dim) % 2:
            raise ValueError(
                "CCA splits the values in a current and a delayed half: "
                "num_key_value_heads * head_dim must be even"
            )
        if self.rotary_dim % 2:
            raise ValueError(
                f"head_dim * partial_rotary_factor = {self.rotary_dim} must be even for RoPE"
            )
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries "
                f"for {self.num_hidden_layers} layers"
            )
        if "hybrid_sliding" in self.types and self.sliding_window is None:
            raise ValueError("sliding_window must be set when a layer is 'hybrid_sliding'")
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if not 0 <= getattr(self, name) < self.vocab_size:
                raise ValueError(
                    f"{name} {getattr(self, name)} is outside the vocabulary ({self.vocab_size})"
                )
        return self

    @property
    def types(self) -> tuple[LayerType, ...]:
        """Type of every layer, filled in where `layer_types` is None."""
        if self.layer_types is not None:
            return self.layer_types
        full: LayerType = "hybrid"
        return (full,) * self.num_hidden_layers

    @property
    def query_width(self) -> int:
        """Width of the query latent, E/C1."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Width of the key latent and of the value latent, E/C2."""
        return self.num_key_value_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolved query-key latent."""
        return self.query_width + self.key_width

    @property
    def conv_history(self) -> int:
        """Earlier tokens that the two convolutions together look back on."""
        return (self.cca_time0 - 1) + (self.cca_time1 - 1)

    @property
    def rotary_dim(self) -> int:
        """Channels of each head that RoPE turns."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def num_router_classes(self) -> int:
        """Experts plus the skip class, where there is one."""
        return self.num_experts + (self.skip_expert != "none")

    def window(self, layer_type: LayerType) -> int | None:
        """Tokens a layer of this type sees, or None for all earlier ones."""
        return self.sliding_window if layer_type == "hybrid_sliding" else None

    def theta(self, layer_type: LayerType) -> float:
        """RoPE base of a layer of this type."""
        return self.sliding_rope_theta if layer_type == "hybrid_sliding" else self.rope_theta


PRESETS: dict[str, ModelConfig] = {
    # For tests and first steps: every part of MoE++ is there, nothing is big.
    "tiny": ModelConfig(
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        moe_intermediate_size=64,
        router_hidden_size=32,
        rope_theta=10_000.0,
        max_position_embeddings=512,
        eos_token_id=1,
    ),
    # What `openzaya demo` trains on two CPU cores.
    "small": ModelConfig(
        vocab_size=2048,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        moe_intermediate_size=256,
        router_hidden_size=64,
        rope_theta=10_000.0,
        max_position_embeddings=512,
        eos_token_id=1,
    ),
    # arXiv 2605.05365 Table I and the published native configuration.
    "zaya1-8b": ModelConfig(
        vocab_size=262_272,
        hidden_size=2048,
        num_hidden_layers=40,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        num_experts=16,
        moe_intermediate_size=2048,
        router_hidden_size=256,
        rope_theta=5_000_000.0,
        max_position_embeddings=131_072,
    ),
    # The preview's published headers: every other layer slides, starting with the first.
    "zaya1-74b": ModelConfig(
        vocab_size=262_272,
        hidden_size=4096,
        num_hidden_layers=60,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=128,
        layer_types=("hybrid_sliding", "hybrid") * 30,
        sliding_window=4097,
        num_experts=24,
        moe_intermediate_size=4096,
        router_hidden_size=256,
        rope_theta=5_000_000.0,
        max_position_embeddings=262_144,
    ),
}
