"""SwiGLU experts for top-1 routing."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from openzaya.kernels.native.library import TILE, kernels_for, library

ROW_BUCKET = 64
"""Rows per expert are padded to a multiple of this: CPU matrix libraries build a new kernel for
every shape they have not seen, which costs more than the padding."""

STEP = SPREAD = 32
"""How `native/experts.c` pads the columns that it keeps."""

FEW_TOKENS = 64
"""Below this, as in decoding, a loop over the chosen experts beats sorting and padding."""


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """One expert: (silu(x Wg) * x Wu) Wd.

    Args:
        x: [tokens, hidden].
        gate_up: [2 * inner, hidden], gate rows first.
        down: [hidden, inner].
    """
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


def experts_reference(x: Tensor, index: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Every token through its own expert, one expert after the other.

    Args:
        x: [tokens, hidden].
        index: [tokens] int64; values outside 0..experts-1 (the skip class) give zero.
        gate_up: [experts, 2 * inner, hidden].
        down: [experts, hidden, inner].

    Returns:
        [tokens, hidden] in x's dtype.
    """
    # Empty sums keep the weights in the graph: idle experts get a gradient of zero, not none.
    out = torch.zeros_like(x) + (gate_up[:0].sum() + down[:0].sum()).to(x.dtype)
    for expert in index.unique().tolist():
        if not 0 <= expert < gate_up.shape[0]:
            continue
        rows = (index == expert).nonzero().squeeze(-1)
        y = swiglu(x[rows], gate_up[expert].to(x.dtype), down[expert].to(x.dtype))
        out = out.index_copy(0, rows, y)
    return out


def experts(x: Tensor, index: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """As `experts_reference`, with one grouped product over all experts where that pays."""
    aligned = 16 // x.element_size()  # grouped products need rows of a multiple of 16 bytes
    if x.shape[0] < FEW_TOKENS or any(n % aligned for n in (*gate_up.shape[1:], down.shape[2])):
        return experts_reference(x, index, gate_up, down)
    num_experts = gate_up.shape[0]
    counts = torch.bincount(index, minlength=num_experts + 1)
    padded = (counts[:num_experts] + ROW_BUCKET - 1) // ROW_BUCKET * ROW_BUCKET
    ends = padded.cumsum(0)
    if not int(ends[-1]):  # every token skips
        return experts_reference(x, index, gate_up, down)
    # Row of each token in the padded buffer: start of its expert + rank among its tokens.
    order = index.argsort(stable=True)
    starts = torch.cat([ends - padded, ends[-1:]])
    shift = starts - (counts.cumsum(0) - counts)[: num_experts + 1]
    row = torch.empty_like(index)
    row[order] = torch.arange(index.shape[0], device=x.device) + shift[index[order]]
    # Skipped tokens land behind the last expert, in rows that no product touches.
    buffer = x.new_zeros(int(ends[-1]) + int(counts[num_experts:].sum()), x.shape[1])
    buffer = buffer.index_copy(0, row, x)
    offsets = ends.to(torch.int32)
    used = buffer[: int(ends[-1])]
    hidden = F.grouped_mm(used, gate_up.to(x.dtype).transpose(1, 2), offs=offsets)
    gate, up = hidden.chunk(2, dim=-1)
    y = F.grouped_mm(F.silu(gate) * up, down.to(x.dtype).transpose(1, 2), offs=offsets)
    y = F.pad(y, (0, 0, 0, buffer.shape[0] - y.shape[0]))
    return y.index_select(0, row)


def mix_experts(
    x: Tensor,
    index: Tensor,
    weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    skip_identity: bool,
) -> Tensor:
    """Every token's expert, times its routing weight.

    Args:
        x: [tokens, hidden].
        index: [tokens] int64; values outside 0..experts-1 are the skip class.
        weight: [tokens] fp32.
        gate_up: [experts, 2 * inner, hidden], any dtype.
        down: [experts, hidden, inner], any dtype.
        skip_identity: whether the skip class gives x instead of zero.

    Returns:
        [tokens, hidden] in x's dtype.
    """
    aligned = all(n % TILE == 0 for n in down.shape[1:])
    fp32 = weight.dtype == gate_up.dtype == down.dtype == torch.float32
    if kernels_for(x) is not None and aligned and fp32 and x.shape[0] >= FEW_TOKENS:
        return _NativeExperts.apply(x, index, weight, gate_up, down, skip_identity)
    out = experts(x, index, gate_up, down)
    if skip_identity:
        skipped = (index < 0) | (index >= gate_up.shape[0])
        out = torch.where(skipped[:, None], x, out)
    return (out * weight[:, None]).to(x.dtype)


class _NativeExperts(torch.autograd.Function):
    """`native/experts.c`: each expert's weights are narrowed as they are used, never as a whole."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        index: Tensor,
        weight: Tensor,
        gate_up: Tensor,
        down: Tensor,
        skip_identity: bool,
    ) -> Tensor:
        lib = library()
        assert lib is not None
        x, weight = x.contiguous(), weight.contiguous()
        tokens, hidden = x.shape
        count, inner = down.shape[0], down.shape[2]
        order = torch.empty(tokens, dtype=torch.int32)
        begins = torch.empty(count + 1, dtype=torch.int32)
        lib.call("sort_by_expert", tokens, count, index.contiguous(), order, begins)
        ctx.sizes = tokens, hidden, inner, count, int(skip_identity)
        operands = x, order, begins, weight, gate_up.contiguous(), down.contiguous()
        columns = -(-tokens // STEP) * STEP + count * STEP + SPREAD
        wide = x.new_empty(2 * inner, columns)
        out = torch.empty_like(x)
        lib.call("experts_forward", *ctx.sizes, *operands, wide, out)
        ctx.save_for_backward(*operands, wide)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        lib = library()
        assert lib is not None
        *operands, wide = ctx.saved_tensors
        x, _, _, weight, gate_up, down = operands
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
        grad_gate_up = torch.empty_like(gate_up) if ctx.needs_input_grad[3] else None
        grad_down = torch.empty_like(down) if ctx.needs_input_grad[4] else None
        lib.call(
            "experts_backward",
            *ctx.sizes,
            *operands,
            wide,
            grads[0].contiguous(),
            grad_x,
            grad_weight,
            grad_gate_up,
            grad_down,
        )
        return grad_x, None, grad_weight, grad_gate_up, grad_down, None
