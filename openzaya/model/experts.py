"""The mixture-of-experts sub-layer: route, compute the chosen expert, weigh its output."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from openzaya.kernels.experts import mix_experts
from openzaya.model.config import ModelConfig
from openzaya.model.router import LinearRouter, Routing, ZayaRouter


class Experts(nn.Module):
    """Stacked SwiGLU weights; gate rows come first in `gate_up_proj`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        count, inner = config.num_experts, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, config.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(count, config.hidden_size, inner))
        self.skip_identity = config.skip_expert == "identity"

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        """The chosen expert's output, times its weight.

        Args:
            x: [tokens, hidden].
            index: [tokens] int64; the skip class gives zero, or x.
            weight: [tokens] fp32.

        Returns:
            [tokens, hidden] in x's dtype.
        """
        return mix_experts(x, index, weight, self.gate_up_proj, self.down_proj, self.skip_identity)


class MixtureOfExperts(nn.Module):
    """Router and experts, with what the skip class adds."""

    def __init__(self, config: ModelConfig, first: bool) -> None:
        super().__init__()
        router = ZayaRouter if config.router == "zaya" else LinearRouter
        self.gate = router(config, first)
        self.experts = Experts(config)

    def forward(
        self, x: Tensor, previous: Tensor | None, chosen: Tensor | None = None
    ) -> tuple[Tensor, Routing]:
        """Mix [batch, seq, hidden].

        Args:
            previous: router state of the layer below, or None in the first layer.
            chosen: [batch, seq] classes to take instead of the router's choice.

        Returns:
            [batch, seq, hidden] in x's dtype, and the routing.
        """
        routing = self.gate(x, previous, chosen)
        out = self.experts(x.flatten(0, 1), routing.chosen.flatten(), routing.weight.flatten())
        return out.view_as(x), routing
