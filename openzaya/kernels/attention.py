"""Softmax attention with grouped key-value heads."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from openzaya.kernels.native.library import TILE, kernels_for, library


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
    """Scaled dot-product attention, softmax in fp32, scale 1/sqrt(head_dim).

    Args:
        q: [batch, queries, heads, head_dim].
        k: [batch, keys, kv_heads, head_dim]; each serves heads / kv_heads query heads.
        v: [batch, keys, kv_heads, head_dim].
        mask: [batch or 1, queries, keys] boolean, True where a query sees a key; None sees all.
        causal: apply the causal mask over equal numbers of queries and keys; `mask` must be None.

    Returns:
        [batch, queries, heads, head_dim].
    """
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=None if mask is None else mask[:, None],
        is_causal=causal,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


def attend_documents(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, window: int | None
) -> Tensor:
    """Causal attention of whole rows, each token seeing its own document only.

    Keys that a token does not see cost nothing on a CPU in bf16 (`native/attention.c`) and in half
    precision on a GPU (torch's flash attention over documents of any length). Elsewhere a mask
    [batch, seq, seq] is made where there are borders or a window.

    Args:
        q: [batch, heads, seq, head_dim].
        k: [batch, kv_heads, seq, head_dim]; each serves heads / kv_heads query heads.
        v: [batch, kv_heads, seq, head_dim].
        starts: [batch, seq] int32, place in the row at which each token's document begins,
            ascending; None if every row is one document.
        window: tokens that a token sees, itself included; None sees all.

    Returns:
        [batch, seq, heads, head_dim].
    """
    if kernels_for(q) is not None and q.shape[-1] % TILE == 0:
        return _NativeAttention.apply(q, k, v, starts, window or 0)
    seq = q.shape[2]
    narrow = window is not None and window < seq
    if q.is_cuda and q.dtype != torch.float32 and (starts is not None or narrow):
        return _attend_varlen(q, k, v, starts, window)
    mask = None
    if starts is not None or narrow:
        place = torch.arange(seq, device=q.device)
        mask = (place[None] <= place[:, None])[None]
        if starts is not None:
            mask = mask & (place >= starts[..., None])
        if window is not None:
            mask = mask & (place[None] > place[:, None] - window)
    return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, mask is None)


def document_borders(starts: Tensor) -> tuple[Tensor, int]:
    """Where the documents of a batch begin when its rows are laid end to end.

    Args:
        starts: [batch, seq] as in `attend_documents`.

    Returns:
        Ascending places int32 [documents + 1], the last one being batch * seq; and the length of
        the longest document.
    """
    first = starts == torch.arange(starts.shape[1], device=starts.device)
    first[:, 0] = True
    end = torch.tensor([starts.numel()], device=starts.device)
    borders = torch.cat([first.flatten().nonzero().squeeze(1), end])
    return borders.int(), int(borders.diff().max())


def _attend_varlen(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    batch, heads, seq, dim = q.shape
    if starts is None:
        starts = torch.zeros(batch, seq, dtype=torch.int32, device=q.device)
    borders, longest = document_borders(starts)
    grouped = heads != k.shape[1]
    q, k, v = (x.transpose(1, 2).reshape(batch * seq, -1, dim) for x in (q, k, v))
    sight = (-1 if window is None else window - 1, 0)
    out = varlen_attn(
        q, k, v, borders, borders, longest, longest, window_size=sight, enable_gqa=grouped
    )
    assert isinstance(out, Tensor)
    return out.view(batch, seq, heads, dim)


class _NativeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, window: int
    ) -> Tensor:
        lib = library()
        assert lib is not None
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        batch, heads, seq, dim = q.shape
        out = q.new_empty(batch, seq, heads, dim)
        lse = q.new_empty(batch, heads, seq, dtype=torch.float32)
        ctx.sizes = batch, heads, k.shape[1], seq, dim, window
        lib.call("attention_forward", *ctx.sizes, q, k, v, starts, out, lse)
        ctx.save_for_backward(q, k, v, starts, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        lib = library()
        assert lib is not None
        q, k, v, starts, out, lse = ctx.saved_tensors
        results = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        lib.call(
            "attention_backward",
            *ctx.sizes,
            q,
            k,
            v,
            starts,
            out,
            lse,
            grads[0].contiguous(),
            *results,
        )
        return *results, None, None


def attend_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False
) -> Tensor:
    """The same as `attend`, written out."""
    group = q.shape[2] // k.shape[2]
    k = k.repeat_interleave(group, dim=2)
    v = v.repeat_interleave(group, dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * q.shape[-1] ** -0.5
    if causal:
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril()[None]
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None], float("-inf"))
    weights = scores.softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights.to(v.dtype), v)
