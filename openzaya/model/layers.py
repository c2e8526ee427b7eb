"""The two elementary layers: a linear map and RMSNorm, each with fp32 master weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openzaya.kernels.norm import rms_norm


class Linear(nn.Linear):
    """y = x W^T + b, computed in the dtype of x; weights are cast, gradients flow back in fp32."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned gain (arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[..., width] of any dtype -> [..., width] in `dtype`."""
        return rms_norm(x, self.weight, self.eps, dtype)
