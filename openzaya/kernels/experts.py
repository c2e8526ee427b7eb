"""SwiGLU experts for top-1 routing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_BUCKET = 64
"""Rows per expert are padded to a multiple of this: CPU matrix libraries build a new kernel for
every shape they have not seen, which costs more than the padding."""

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
