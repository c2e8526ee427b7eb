"""Initial values of parameters (the papers leave them open; each choice says why)."""

from __future__ import annotations

import math

import torch

from openzaya.model.cca import CausalConv
from openzaya.model.experts import Experts
from openzaya.model.layers import Linear
from openzaya.model.model import Zaya
from openzaya.model.router import RouterMLP, initial_biases


def init_weights(model: Zaya, seed: int) -> None:
    """Fill all parameters in place, reproducibly.

    - Embeddings: normal, `initializer_range`.
    - Linear maps and experts: normal with deviation 1/sqrt(inputs), so that outputs start at the
      size of inputs whatever the width; those that write to the residual stream are smaller by
      sqrt(2 * layers).
    - The depthwise convolution passes each token through unchanged; the per-head one is a random
      map of all its taps.
    - The router's hidden maps have gain sqrt(2) (GELU halves the variance), so that tokens differ
      in their probabilities from the start: where all tokens look alike, each step of the
      balancing biases flips whole batches from one expert to the next.
    - What follows a GELU sees inputs of positive mean. The router's rows there sum to zero, so
      that this mean, the same for every token, prefers no expert.
    """
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    into_stream = 1.0 / math.sqrt(2 * config.num_hidden_layers)

    def normal(parameter: torch.Tensor, std: float) -> None:
        value = torch.randn(parameter.shape, generator=generator) * std
        parameter.copy_(value)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Gains, scales and temperatures start at 1, biases at 0, matrices below.
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        for name, buffer in model.named_buffers():
            if name.endswith("balancing_biases"):
                buffer.copy_(initial_biases(config))
        normal(model.model.embed_tokens.weight, config.initializer_range)
        if model.lm_head is not None:
            normal(model.lm_head.weight, config.initializer_range)
        for name, module in model.named_modules():
            if isinstance(module, Linear):
                gain = into_stream if name.endswith("o_proj") else 1.0
                normal(module.weight, gain / math.sqrt(module.in_features))
            elif isinstance(module, Experts):
                normal(module.gate_up_proj, 1.0 / math.sqrt(config.hidden_size))
                normal(module.down_proj, into_stream / math.sqrt(config.moe_intermediate_size))
            elif isinstance(module, CausalConv) and module.weight.shape[1] == 1:
                module.weight.zero_()
                module.weight[:, 0, -1] = 1.0
            elif isinstance(module, CausalConv):
                normal(module.weight, 1.0 / math.sqrt(module.weight[0].numel()))
        for module in model.modules():
            if isinstance(module, RouterMLP):
                module.fc1.weight.mul_(math.sqrt(2.0))
                module.fc2.weight.mul_(math.sqrt(2.0))
                for layer in (module.fc2, module.out_proj):
                    layer.weight.sub_(layer.weight.mean(1, keepdim=True))
