"""The two elementary layers: a linear map and RMSNorm, each with fp32 master weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from openzaya.kernels.norm import rms_norm
from openzaya.kernels.weights import linear


class Linear(nn.Linear):
    """y = x W^T + b, computed in the dtype of x; weights are cast, gradients flow back in fp32."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        out = linear(x, self.weight)
        return out if self.bias is None else out + self.bias.to(x.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned gain (arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[..., width] of any dtype -> [..., width] in `dtype`."""
        return rms_norm(x, self.weight, self.eps, dtype)
