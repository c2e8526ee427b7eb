"""Which expert takes a token (arXiv 2605.05365, equations 1 to 5).

r_l = W_down x_l + gamma * r_(l-1)      router state, averaged over depth (EDA)
s_l = softmax(MLP(RMSNorm(r_l)))        probabilities
expert = argmax(s_l + b_l)              b balances the load and is no parameter: `optim/balance.py`
weight = s_l[expert]                    the unbiased probability, not renormalised

All of it is fp32: a rounding error in a router is not a small error but another expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openzaya.model.config import ModelConfig
from openzaya.model.layers import Linear, RMSNorm

SKIP_BIAS = -1.0
"""Initial balancing bias of the skip class: as probabilities end at 1, it hardly ever wins."""


class Routing(NamedTuple):
    """A router's decisions.

    Attributes:
        chosen: [batch, seq] int64 class of each token; `num_experts` is the skip class.
        weight: [batch, seq] fp32 unbiased probability of that class.
        probabilities: [batch, seq, classes] fp32.
        state: [batch, seq, router_hidden] fp32 for the next layer; None from a linear router.
    """

    chosen: Tensor
    weight: Tensor
    probabilities: Tensor
    state: Tensor | None


def _choose(logits: Tensor, biases: Tensor, state: Tensor | None, chosen: Tensor | None) -> Routing:
    probabilities = logits.softmax(-1)
    if chosen is None:
        chosen = (probabilities.detach() + biases).argmax(-1)
    weight = probabilities.gather(-1, chosen[..., None]).squeeze(-1)
    return Routing(chosen, weight, probabilities, state)


def initial_biases(config: ModelConfig) -> Tensor:
    """[classes] fp32: zero for experts, `SKIP_BIAS` for the skip class."""
    biases = torch.zeros(config.num_router_classes)
    if config.skip_expert != "none":
        biases[-1] = SKIP_BIAS
    return biases


class RouterMLP(nn.Module):
    """RMSNorm and three linear maps with exact GELU between them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.router_hidden_size
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.fc1 = Linear(width, width, bias=True)
        self.fc2 = Linear(width, width, bias=True)
        self.out_proj = Linear(width, config.num_router_classes)

    def forward(self, state: Tensor) -> Tensor:
        """[batch, seq, router_hidden] -> logits [batch, seq, classes], in fp32."""
        x = self.norm(state, torch.float32)
        return self.out_proj(F.gelu(self.fc2(F.gelu(self.fc1(x)))))


class ZayaRouter(nn.Module):
    """MLP router with exponential depth averaging.

    Args:
        first: the first layer has no earlier router state to average with.
    """

    balancing_biases: Tensor

    def __init__(self, config: ModelConfig, first: bool) -> None:
        super().__init__()
        self.down_proj = Linear(config.hidden_size, config.router_hidden_size, bias=True)
        self.router_states_scale = (
            None if first else nn.Parameter(torch.ones(config.router_hidden_size))
        )
        self.router_mlp = RouterMLP(config)
        self.register_buffer("balancing_biases", initial_biases(config))

    def forward(self, x: Tensor, previous: Tensor | None, chosen: Tensor | None = None) -> Routing:
        """Route [batch, seq, hidden].

        Args:
            previous: the layer below's state [batch, seq, router_hidden].
            chosen: [batch, seq] classes to take instead of choosing (replay); weights and
                gradients are still those of the probabilities.
        """
        state = self.down_proj(x.float())
        if self.router_states_scale is not None:
            assert previous is not None
            state = state + self.router_states_scale * previous
        return _choose(self.router_mlp(state), self.balancing_biases, state, chosen)


class LinearRouter(nn.Module):
    """One linear map: the baseline that the ZAYA1 router is measured by."""

    balancing_biases: Tensor

    def __init__(self, config: ModelConfig, first: bool) -> None:
        super().__init__()
        self.out_proj = Linear(config.hidden_size, config.num_router_classes)
        self.register_buffer("balancing_biases", initial_biases(config))

    def forward(self, x: Tensor, previous: Tensor | None, chosen: Tensor | None = None) -> Routing:
        """As `ZayaRouter.forward`; there is no state to average."""
        return _choose(self.out_proj(x.float()), self.balancing_biases, None, chosen)
