"""The mixture-of-experts sub-layer: route, compute the chosen expert, weigh its output."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from openzaya.kernels.experts import experts
from openzaya.model.config import ModelConfig
from openzaya.model.router import LinearRouter, Routing, ZayaRouter


class Experts(nn.Module):
    """Stacked SwiGLU weights; gate rows come first in `gate_up_proj`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        count, inner = config.num_experts, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, config.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(count, config.hidden_size, inner))

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        """[tokens, hidden], [tokens] -> [tokens, hidden]; zero for the skip class."""
        return experts(x, index, self.gate_up_proj, self.down_proj)


class MixtureOfExperts(nn.Module):
    """Router and experts, with what the skip class adds."""

    def __init__(self, config: ModelConfig, first: bool) -> None:
        super().__init__()
        router = ZayaRouter if config.router == "zaya" else LinearRouter
        self.gate = router(config, first)
        self.experts = Experts(config)
        self.skip_class = config.num_experts
        self.skip_identity = config.skip_expert == "identity"

    def forward(self, x: Tensor, previous: Tensor | None) -> tuple[Tensor, Routing]:
        """Mix [batch, seq, hidden].

        Args:
            previous: router state of the layer below, or None in the first layer.

        Returns:
            [batch, seq, hidden] in x's dtype, and the routing.
        """
        routing = self.gate(x, previous)
        out = self.experts(x.flatten(0, 1), routing.chosen.flatten()).view_as(x)
        if self.skip_identity:
            out = torch.where((routing.chosen == self.skip_class)[..., None], x, out)
        return (out * routing.weight[..., None]).to(x.dtype), routing
