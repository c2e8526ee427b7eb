"""Matrices with fp32 master weights, multiplied in a lower precision.

Each forward casts the weights it multiplies with. To keep the copies until the weights change would
be cheaper by little, and wrong: torch's fused optimizers change parameters without a trace.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, *weights: Tensor) -> Tensor:
    """x W^T in the dtype of x, W being the weights with their rows stacked.

    Args:
        x: [..., columns].
        weights: [rows, columns] each, any dtype; gradients come back in it.

    Returns:
        [..., sum of rows].
    """
    if len(weights) == 1 and weights[0].dtype == x.dtype:
        return F.linear(x, weights[0])
    return _Linear.apply(x, *weights)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        parts = [w.to(x.dtype) for w in weights]
        low = parts[0] if len(parts) == 1 else torch.cat(parts)
        ctx.save_for_backward(x, low)
        ctx.rows = [w.shape[0] for w in weights]
        ctx.dtypes = [w.dtype for w in weights]
        return F.linear(x, low)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, low = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        need = ctx.needs_input_grad
        grad_x = (grad @ low).view_as(x) if need[0] else None
        grad_weights: list[Tensor | None] = [None] * len(ctx.rows)
        if any(need[1:]):
            whole = grad.T @ x.flatten(0, -2)
            grad_weights = [
                part.to(dtype)
                for part, dtype in zip(whole.split(ctx.rows), ctx.dtypes, strict=True)
            ]
        return grad_x, *grad_weights
