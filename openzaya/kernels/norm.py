"""Normalisations, and the residual merge that stands before them. fp32 whatever the input dtype.

RMSNorm and L2 normalisation both divide a vector by its root mean square, so both share one
backward pass, written by hand: on a CPU these are bound by memory, and autograd's own takes twice
as many passes. Merge and norm together take a single one in C (`native/norm.c`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openzaya.kernels.native.library import kernels_for, library

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
    if kernels_for(x, dtype) is not None:
        return _MergeNorm.apply(x.float().contiguous(), None, None, None, None, weight, eps)[1]
    return _RMSNorm.apply(x.float(), weight.float(), eps, 0.0).to(dtype)


def merge(
    stream: Tensor, output: Tensor, bias: Tensor, residual_scale: Tensor, output_scale: Tensor
) -> Tensor:
    """bias + stream * residual_scale + output * output_scale, summed in fp32.

    Args:
        stream: [..., width] fp32.
        output: [..., width], any float dtype.
        bias, residual_scale, output_scale: [width].

    Returns:
        [..., width] fp32.
    """
    if kernels_for(output) is not None:
        return _MergeNorm.apply(stream, output, bias, residual_scale, output_scale, None, 0.0)[0]
    return merge_reference(stream, output, bias, residual_scale, output_scale)


def merge_norm(
    stream: Tensor,
    output: Tensor,
    bias: Tensor,
    residual_scale: Tensor,
    output_scale: Tensor,
    weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """`merge`, then `rms_norm` of the sum into the dtype of `output`.

    Returns:
        The merged stream, [..., width] fp32, and its norm, [..., width].
    """
    if kernels_for(output) is not None:
        return _MergeNorm.apply(stream, output, bias, residual_scale, output_scale, weight, eps)
    merged = merge_reference(stream, output, bias, residual_scale, output_scale)
    return merged, rms_norm(merged, weight, eps, output.dtype)


def merge_reference(
    stream: Tensor, output: Tensor, bias: Tensor, residual_scale: Tensor, output_scale: Tensor
) -> Tensor:
    """The same as `merge`, by torch; each operand is passed over once."""
    stream = torch.addcmul(bias.float(), stream, residual_scale.float())
    return torch.addcmul(stream, output.float(), output_scale.float())


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


class _MergeNorm(torch.autograd.Function):
    """`merge` and `rms_norm` in one pass each way; without output no merge, without gain no norm.

    Returns:
        The merged stream (None without a merge) and its norm in bf16 (None without a gain).
    """

    @staticmethod
    def forward(
        ctx: Any,
        stream: Tensor,
        output: Tensor | None,
        bias: Tensor | None,
        residual_scale: Tensor | None,
        output_scale: Tensor | None,
        gain: Tensor | None,
        eps: float,
    ) -> tuple[Tensor | None, Tensor | None]:
        lib = library()
        assert lib is not None
        ctx.set_materialize_grads(False)
        ctx.dtypes = [None if t is None else t.dtype for t in (bias, residual_scale, output_scale)]
        ctx.gain_dtype = None if gain is None else gain.dtype
        # Autograd casts gradients back; the kernel itself knows no other dtypes than these.
        stream = stream.float().contiguous()
        output = None if output is None else output.contiguous()
        bias, residual_scale, output_scale, gain = (
            None if t is None else t.detach().float().contiguous()
            for t in (bias, residual_scale, output_scale, gain)
        )
        width = stream.shape[-1]
        rows = stream.numel() // width
        merged = None if output is None else torch.empty_like(stream)
        normed = None if gain is None else torch.empty_like(stream, dtype=torch.bfloat16)
        inverse = None if gain is None else stream.new_empty(rows)
        lib.call(
            "merge_norm_forward",
            rows,
            width,
            stream,
            output,
            bias,
            residual_scale,
            output_scale,
            gain,
            eps,
            merged,
            normed,
            inverse,
        )
        ctx.save_for_backward(stream, output, residual_scale, output_scale, gain, merged, inverse)
        return merged, normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        stream, output, residual_scale, output_scale, gain, merged, inverse = ctx.saved_tensors
        lib = library()
        assert lib is not None
        grad_merged, grad_normed = (None if g is None else g.contiguous() for g in grads)
        if gain is not None and grad_normed is None:
            grad_normed = torch.zeros_like(stream, dtype=torch.bfloat16)
        if gain is None and grad_merged is None:
            return (None,) * 7
        width = stream.shape[-1]
        grad_stream = torch.empty_like(stream)
        grad_output = None if output is None else torch.empty_like(output)
        sums = stream.new_empty(4, width)
        lib.call(
            "merge_norm_backward",
            stream.numel() // width,
            width,
            stream,
            output,
            residual_scale,
            output_scale,
            gain,
            stream if merged is None else merged,
            inverse,
            grad_merged,
            grad_normed,
            grad_stream,
            grad_output,
            sums,
        )
        small = [
            None if dtype is None else column.to(dtype)
            for dtype, column in zip(ctx.dtypes, sums, strict=False)
        ]
        grad_gain = None if gain is None else sums[3].to(ctx.gain_dtype)
        return grad_stream, grad_output, *small, grad_gain, None
