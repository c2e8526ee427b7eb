"""How a sub-layer's output joins the residual stream, always summed in fp32.

Residual scaling (arXiv 2605.05365, equation 6, in the form of the released code): both the stream
and the output are (x + bias) * scale before the sum, with a learned bias and scale per channel.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from openzaya.kernels.norm import merge, merge_norm
from openzaya.model.layers import RMSNorm


class Merge(nn.Module):
    """bias + stream * a_r + output * a_h, with coefficients that a kind of residual defines."""

    def coefficients(self, stream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """bias, a_r and a_h, [hidden] each, on the device of the stream."""
        raise NotImplementedError

    def forward(
        self, output: Tensor, stream: Tensor, norm: RMSNorm | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Merge, and normalise in the same pass.

        Args:
            output: [batch, seq, hidden] of a sub-layer, any dtype.
            stream: [batch, seq, hidden] fp32.
            norm: that the next sub-layer begins with.

        Returns:
            The new stream in fp32, and its norm in the dtype of `output` if one is given.
        """
        if norm is None:
            return merge(stream, output, *self.coefficients(stream)), None
        return merge_norm(stream, output, *self.coefficients(stream), norm.weight, norm.eps)


class ResidualScaling(Merge):
    """(stream + b_r) * a_r + (output + b_h) * a_h."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden_states_scale = nn.Parameter(torch.ones(width))
        self.hidden_states_bias = nn.Parameter(torch.zeros(width))
        self.residual_scale = nn.Parameter(torch.ones(width))
        self.residual_bias = nn.Parameter(torch.zeros(width))

    def coefficients(self, stream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Multiplied out, so that both biases are one."""
        bias = (
            self.hidden_states_bias * self.hidden_states_scale
            + self.residual_bias * self.residual_scale
        )
        return bias, self.residual_scale, self.hidden_states_scale


class PlainResidual(Merge):
    """stream + output: the baseline that residual scaling is measured by."""

    def coefficients(self, stream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """No bias, no scales."""
        one = stream.new_ones(stream.shape[-1])
        return torch.zeros_like(one), one, one


def residual(kind: str, width: int) -> Merge:
    """The merge that a configuration names."""
    return ResidualScaling(width) if kind == "scaled" else PlainResidual()
