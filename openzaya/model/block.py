"""One layer: attention, then experts, each normalised before and merged into the stream after."""

from __future__ import annotations

from torch import Tensor, nn

from openzaya.model.attention import StandardAttention
from openzaya.model.cca import CCAttention
from openzaya.model.config import ModelConfig
from openzaya.model.experts import MixtureOfExperts
from openzaya.model.layers import RMSNorm
from openzaya.model.layout import Layout
from openzaya.model.recompute import Recompute, twice, twice_routed
from openzaya.model.residual import residual
from openzaya.model.router import Routing
from openzaya.model.state import LayerState


class Block(nn.Module):
    """Layer number `index` of the model."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        attention = CCAttention if config.attention == "cca" else StandardAttention
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = attention(config, config.types[index])
        self.post_attention_residual_scale = residual(config.residual, width)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = MixtureOfExperts(config, first=index == 0)
        self.post_mlp_residual_scale = residual(config.residual, width)

    def forward(
        self,
        stream: Tensor,
        router_state: Tensor | None,
        layout: Layout,
        state: LayerState | None,
        chosen: Tensor | None = None,
        recompute: Recompute = "none",
    ) -> tuple[Tensor, Routing]:
        """Advance the residual stream by one layer.

        Args:
            stream: [batch, seq, hidden] fp32.
            router_state: [batch, seq, router_hidden] fp32 of the layer below, None in the first.
            chosen: [batch, seq] experts to take instead of the router's choice.
            recompute: the sub-layer that keeps nothing for the backward.

        Returns:
            The new stream, and the routing with the state for the next layer.
        """
        x = self.input_layernorm(stream, layout.dtype)
        if recompute == "attention":
            out = twice(self.self_attn, x, layout, state)
        else:
            out = self.self_attn(x, layout, state)
        if layout.residual_in_fp32:
            stream, x = self.post_attention_residual_scale(
                out, stream, self.post_attention_layernorm
            )
        else:
            stream = layout.settle(self.post_attention_residual_scale(out, stream)[0])
            x = self.post_attention_layernorm(stream, layout.dtype)
        if recompute == "experts":
            out, routing = twice_routed(self.mlp, x, router_state)
        else:
            out, routing = self.mlp(x, router_state, chosen)
        return layout.settle(self.post_mlp_residual_scale(out, stream)[0]), routing
