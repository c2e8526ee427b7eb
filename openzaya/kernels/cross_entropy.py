"""LM head and cross-entropy in one step, a chunk of tokens at a time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from openzaya.kernels.native.library import TILE, kernels_for, library

IGNORE = -100
"""Target of tokens that carry no loss."""

CHUNK = 1024
"""Tokens whose logits are held at once."""


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Summed next-token cross-entropy of `hidden @ weight.T`, sums, logits and softmax in fp32.

    Logits of a few tokens exist at a time; the gradient is formed in the same pass. Hidden states
    in bf16 are multiplied with the weight in bf16 on a CPU that has kernels for it, and with the
    weight as it is elsewhere.

    Args:
        hidden: [tokens, width].
        weight: [vocab, width].
        targets: [tokens] int64, `IGNORE` where there is no loss.

    Raises:
        IndexError: if a target is neither `IGNORE` nor in the vocabulary (on other devices and
            without kernels this is torch's own error).

    Returns:
        Scalar fp32: the sum (not the mean) over tokens with a target, in nats.
    """
    if kernels_for(hidden) is not None and hidden.shape[1] % TILE == 0 and hidden.shape[0]:
        return _NativeLinearCrossEntropy.apply(hidden, weight, targets, torch.is_grad_enabled())
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


class _NativeLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, grad_mode: bool
    ) -> Tensor:
        lib = library()
        assert lib is not None
        tokens, width = hidden.shape
        vocab = weight.shape[0]
        _check(hidden, weight, targets)
        loss = torch.empty(tokens)
        needs_grad = grad_mode and any(ctx.needs_input_grad)
        grad_hidden = torch.empty(tokens, width) if needs_grad else None
        grad_weight = torch.empty(vocab, width) if needs_grad else None
        lib.call(
            "cross_entropy",
            tokens,
            vocab,
            width,
            hidden.contiguous(),
            weight.detach().to(torch.bfloat16).contiguous(),
            targets.contiguous(),
            loss,
            grad_hidden,
            grad_weight,
        )
        if needs_grad:
            ctx.save_for_backward(grad_hidden, grad_weight)
            ctx.dtypes = hidden.dtype, weight.dtype
        return loss.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = (
            (saved * grads[0]).to(dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return grad_hidden, grad_weight, None, None


def _check(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    """Raise for what the kernel would read past an end of, or leave out in silence."""
    (tokens, width), vocab = hidden.shape, weight.shape[0]
    if weight.shape[1] != width or targets.shape != (tokens,) or targets.dtype != torch.int64:
        raise ValueError(
            f"a head {list(weight.shape)} and targets {list(targets.shape)} of {targets.dtype} do "
            f"not fit hidden states {list(hidden.shape)}"
        )
    outside = ((targets < 0) | (targets >= vocab)) & (targets != IGNORE)
    if bool(outside.any()):
        raise IndexError(f"target {int(targets[outside][0])} is outside the vocabulary of {vocab}")


def linear_cross_entropy_reference(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The same as `linear_cross_entropy`, with all logits at once."""
    logits = hidden.float() @ weight.float().T
    return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
