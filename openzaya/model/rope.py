"""Rotary position embedding on the first part of each head (arXiv 2104.09864)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_angles(positions: Tensor, rotary_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position x frequency.

    Args:
        positions: [batch, seq] int64, counted within the document.
        rotary_dim: channels that turn, in pairs (i, i + rotary_dim / 2).
        theta: base; pair i turns by theta^(-2i / rotary_dim) radians per token.

    Returns:
        Two fp32 tensors [batch, seq, 1, rotary_dim / 2].
    """
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=positions.device)
    frequency = 1.0 / theta ** (exponent / max(rotary_dim, 1))
    angle = (positions.float()[..., None] * frequency)[:, :, None]
    return angle.cos(), angle.sin()


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the first channels of every head; the rest passes through.

    Args:
        x: [batch, seq, heads, head_dim].
        angles: from `rotary_angles`.
    """
    cos, sin = angles
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)
