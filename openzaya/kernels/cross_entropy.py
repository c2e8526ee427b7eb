"""LM head and cross-entropy in one step, a chunk of tokens at a time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100
"""Target of tokens that carry no loss."""

CHUNK = 1024
"""Tokens whose logits are held at once."""


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Summed next-token cross-entropy of `hidden @ weight.T`, all in fp32.

    Logits of at most `CHUNK` tokens exist at a time; the gradient is formed in the same pass.

    Args:
        hidden: [tokens, width].
        weight: [vocab, width].
        targets: [tokens] int64, `IGNORE` where there is no loss.

    Returns:
        Scalar fp32: the sum (not the mean) over tokens with a target, in nats.
    """
    return _LinearCrossEntropy.apply(hidden, weight, targets, torch.is_grad_enabled())


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, grad_mode: bool
    ) -> Tensor:
        head = weight.detach().float()
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        # `needs_input_grad` knows nothing of no_grad, hence `grad_mode`.
        needs_grad = grad_mode and any(ctx.needs_input_grad)
        if needs_grad:
            grad_hidden = torch.empty_like(hidden)
            grad_weight = torch.zeros_like(head)
        for start in range(0, hidden.shape[0], CHUNK):
            part = slice(start, start + CHUNK)
            x, target = hidden[part].detach().float(), targets[part]
            logits = x @ head.T
            real = target != IGNORE
            picked = target.where(real, 0)
            log_z = logits.logsumexp(-1)
            nll = log_z - logits.gather(1, picked[:, None]).squeeze(1)
            loss += nll.where(real, 0).sum()
            if not needs_grad:
                continue
            # d nll / d logits = softmax - onehot, zero where there is no target.
            grad = logits.sub_(log_z[:, None]).exp_()
            grad.scatter_add_(1, picked[:, None], grad.new_full((grad.shape[0], 1), -1.0))
            grad *= real[:, None]
            grad_hidden[part] = (grad @ head).to(hidden.dtype)
            grad_weight.addmm_(grad.T, x)
        if needs_grad:
            ctx.save_for_backward(grad_hidden, grad_weight)
            ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grads[0]
        return grad_hidden * scale, (grad_weight * scale).to(ctx.weight_dtype), None, None


def linear_cross_entropy_reference(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The same as `linear_cross_entropy`, with all logits at once."""
    logits = hidden.float() @ weight.float().T
    return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
