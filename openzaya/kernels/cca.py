"""The elementwise part of CCA, from packed latents to attention's operands, in one pass each way.

This is the fast form of what `model/cca.py` writes out, for whole rows on a CPU in bf16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openzaya.kernels.native.library import TILE, kernels_for, library
from openzaya.kernels.norm import L2_FLOOR


def has_kernel(x: Tensor, head_dim: int, taps: tuple[int, int]) -> bool:
    """Whether `latent_qkv` takes latents like `x` with this head size and these convolutions."""
    return taps == (2, 2) and head_dim % TILE == 0 and kernels_for(x) is not None


def latent_qkv(
    packed: Tensor,
    heads: tuple[int, int],
    positions: Tensor | None,
    depthwise: tuple[Tensor, Tensor],
    grouped: tuple[Tensor, Tensor],
    temperature: Tensor,
    angles: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Convolutions, q-k mean, norm, temperature, RoPE and value shift of packed latents.

    Args:
        packed: [batch, seq, (heads + 2 * kv_heads) * head_dim] bf16: query, key and value
            latents; the second half of the value channels goes to the next token.
        heads: query heads and key-value heads.
        positions: [batch, seq] int32 within the document; None if every row is one document.
        depthwise: weight [channels, 1, 2] and bias [channels] of the first convolution, channels
            being (heads + kv_heads) * head_dim; fp32.
        grouped: weight [channels, head_dim, 2] and bias [channels] of the second.
        temperature: [kv_heads].
        angles: RoPE cosine and sine, fp32 [batch or 1, seq, 1, rotary / 2].

    Returns:
        q [batch, heads, seq, head_dim]; k and v [batch, kv_heads, seq, head_dim]; all bf16.
    """
    cosine, sine = (angle.contiguous() for angle in angles)
    return _LatentQKV.apply(
        packed, heads, positions, *depthwise, *grouped, temperature, cosine, sine
    )


class _LatentQKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        packed: Tensor,
        heads: tuple[int, int],
        positions: Tensor | None,
        depthwise: Tensor,
        depthwise_bias: Tensor,
        grouped: Tensor,
        grouped_bias: Tensor,
        temperature: Tensor,
        cosine: Tensor,
        sine: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        lib = library()
        assert lib is not None
        batch, seq, _ = packed.shape
        queries, kv = heads
        dim = grouped.shape[1]
        ctx.sizes = batch, seq, queries, kv, dim, 2 * cosine.shape[-1], int(cosine.shape[0] == 1)
        small = (depthwise, depthwise_bias, grouped, grouped_bias, temperature)
        # Autograd casts gradients back; the kernel itself knows no other dtypes than these.
        operands = [
            packed.detach().contiguous(),
            None if positions is None else positions.contiguous(),
            *(t.detach().float().contiguous() for t in (*small, cosine, sine)),
        ]
        q = packed.new_empty(batch, queries, seq, dim)
        k, v = (packed.new_empty(batch, kv, seq, dim) for _ in range(2))
        lib.call("cca_forward", *ctx.sizes, *operands, L2_FLOOR, q, k, v)
        ctx.save_for_backward(*operands)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        lib = library()
        assert lib is not None
        saved = ctx.saved_tensors  # once only, or checkpointing refuses to recompute them
        packed, _, *small, _, _ = saved
        grad_packed = torch.empty_like(packed)
        grad_small = [torch.empty_like(t) for t in small]
        lib.call(
            "cca_backward",
            *ctx.sizes,
            *saved,
            L2_FLOOR,
            *(g.contiguous() for g in grads),
            grad_packed,
            *grad_small,
        )
        return grad_packed, None, None, *grad_small, None, None
