"""How a sub-layer's output joins the residual stream, always summed in fp32.

Residual scaling (arXiv 2605.05365, equation 6, in the form of the released code): both the stream
and the output are (x + bias) * scale before the sum, with a learned bias and scale per channel.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ResidualScaling(nn.Module):
    """(stream + b_r) * a_r + (output + b_h) * a_h."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden_states_scale = nn.Parameter(torch.ones(width))
        self.hidden_states_bias = nn.Parameter(torch.zeros(width))
        self.residual_scale = nn.Parameter(torch.ones(width))
        self.residual_bias = nn.Parameter(torch.zeros(width))

    def forward(self, output: Tensor, stream: Tensor) -> Tensor:
        """[batch, seq, hidden] output of any dtype, fp32 stream -> fp32 stream."""
        # Multiplied out, so that each stream is passed over once.
        biases = (
            self.hidden_states_bias * self.hidden_states_scale
            + self.residual_bias * self.residual_scale
        )
        stream = torch.addcmul(biases.float(), stream, self.residual_scale.float())
        return torch.addcmul(stream, output.float(), self.hidden_states_scale.float())


class PlainResidual(nn.Module):
    """stream + output: the baseline that residual scaling is measured by."""

    def forward(self, output: Tensor, stream: Tensor) -> Tensor:
        """[batch, seq, hidden] output of any dtype, fp32 stream -> fp32 stream."""
        return output.float() + stream


def residual(kind: str, width: int) -> nn.Module:
    """The merge that a configuration names."""
    return ResidualScaling(width) if kind == "scaled" else PlainResidual()
