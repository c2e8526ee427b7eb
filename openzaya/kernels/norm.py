"""Normalisations. Statistics are fp32 whatever the input dtype."""

from __future__ import annotations

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
    x = x.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * weight).to(dtype)


def l2_normalize(x: Tensor, scale: float | Tensor) -> Tensor:
    """Scale every vector of the last axis to length `scale`.

    Args:
        x: [..., head_dim]; computed and returned in fp32.
        scale: target length, broadcastable to [..., 1].
    """
    x = x.float()
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(L2_FLOOR)
    return x * (scale / norm)
