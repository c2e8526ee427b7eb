"""Softmax attention with grouped key-value heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
