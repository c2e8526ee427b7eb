"""Normalisations. Statistics are fp32 whatever the input dtype.

Both divide a vector by its root mean square, so both share one backward pass, written by hand: on
a CPU these are bound by memory, and autograd's own takes twice as many passes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

L2_FLOOR = torch.finfo(torch.float32).eps
"""Smallest norm that `l2_normalize` divides by, in fp32 whatever the compute dtype."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Root-mean-square norm over the last axis.

    Args:
        x: [..., width], any float dtype.
        weight: [width] gain.
        eps: added to the mean square.
        dtype: dtype of the result; statistics and gain are fp32.

    Returns:
        [..., width] in `dtype`.
    """
    return _RMSNorm.apply(x.float(), weight.float(), eps, 0.0).to(dtype)


def l2_normalize(x: Tensor) -> Tensor:
    """Scale every vector of the last axis to length sqrt(width).

    Args:
        x: [..., width]; computed and returned in fp32. Norms below `L2_FLOOR` count as that.
    """
    width = x.shape[-1]
    return _RMSNorm.apply(x.float(), x.new_ones(width, dtype=torch.float32), 0.0, L2_FLOOR)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """The same as `rms_norm`, written out."""
    x = x.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()).to(dtype)


def l2_normalize_reference(x: Tensor) -> Tensor:
    """The same as `l2_normalize`, written out."""
    x = x.float()
    return x * (x.shape[-1] ** 0.5 / x.norm(dim=-1, keepdim=True).clamp_min(L2_FLOOR))


class _RMSNorm(torch.autograd.Function):
    """y = x r w, with r = 1 / max(sqrt(mean(x^2) + eps), floor / sqrt(width)) per vector."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, floor: float) -> Tensor:
        width = x.shape[-1]
        rms = (x.square().mean(-1, keepdim=True) + eps).sqrt()
        lowest = floor / width**0.5
        r = rms.clamp_min(lowest).reciprocal()
        # Where the floor holds, r does not depend on x.
        slope = (rms > lowest) * r.pow(3) / width
        ctx.save_for_backward(x, weight, r, slope)
        return (x * r).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, r, slope = ctx.saved_tensors
        width = x.shape[-1]
        grad = grads[0].float()
        product = (grad * x).view(-1, width)
        along = (product @ weight).view_as(r)
        grad_weight = r.view(-1) @ product
        grad_x = (grad * weight).mul_(r).addcmul_(x, slope * along, value=-1)
        return grad_x, grad_weight, None, None
