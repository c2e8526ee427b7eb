"""Attention against its written-out reference, and that against a loop."""

from __future__ import annotations

import math

import pytest
import torch

from openzaya.kernels.attention import (
    attend,
    attend_documents,
    attend_reference,
    document_borders,
)
from tests.oracle import relative_error

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def _inputs(queries: int, keys: int, heads: int, kv_heads: int, dtype=torch.float32):
    generator = torch.Generator().manual_seed(queries * 100 + keys)

    def tensor(length: int, count: int) -> torch.Tensor:
        return torch.randn(2, length, count, 16, generator=generator).to(dtype).requires_grad_()

    return tensor(queries, heads), tensor(keys, kv_heads), tensor(keys, kv_heads)


def _mask(kind: str, queries: int, keys: int) -> torch.Tensor | None:
    offset = keys - queries
    query = torch.arange(queries)[:, None] + offset
    key = torch.arange(keys)[None]
    if kind == "none":
        return None
    if kind == "causal":
        return (key <= query)[None]
    if kind == "window":
        return ((key <= query) & (key > query - 3))[None]
    # A mask of its own for every row of the batch.
    documents = (key <= query) & (key // 4 == query // 4)
    return torch.stack([documents, key <= query])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", ["none", "causal", "window", "documents"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 2), (3, 1)])
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (1, 7), (4, 11)])
def test_against_the_reference(dtype, kind, heads, kv_heads, queries, keys):
    """Oracle: `attend_reference`, values and gradients."""
    mask = _mask(kind, queries, keys)
    results = []
    for function in (attend, attend_reference):
        q, k, v = _inputs(queries, keys, heads, kv_heads, dtype)
        out = function(q, k, v, mask)
        assert out.dtype == dtype
        out.float().square().sum().backward()
        results.append((out, q.grad, k.grad, v.grad))
    for actual, expected in zip(*results, strict=True):
        assert relative_error(actual.float(), expected.float()) < 3 * TOLERANCES[dtype]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_causal_flag_is_the_causal_mask(kv_heads):
    q, k, v = _inputs(8, 8, 4, kv_heads)
    expected = attend_reference(q, k, v, _mask("causal", 8, 8))
    assert relative_error(attend(q, k, v, None, causal=True), expected) < 2e-6
    assert relative_error(attend_reference(q, k, v, None, causal=True), expected) < 2e-6


@torch.no_grad()
def test_the_reference_against_a_loop():
    """Oracle: one softmax at a time, in double precision."""
    q, k, v = _inputs(5, 5, 4, 2)
    actual = attend_reference(q, k, v, _mask("window", 5, 5))
    for b in range(2):
        for t in range(5):
            for head in range(4):
                seen = range(max(0, t - 2), t + 1)
                scores = [float(q[b, t, head].double() @ k[b, s, head // 2].double()) for s in seen]
                weights = [math.exp(score / 4) for score in scores]
                parts = [w * v[b, s, head // 2] for w, s in zip(weights, seen, strict=True)]
                expected = sum(parts) / sum(weights)
                assert relative_error(actual[b, t, head], expected) < 2e-6


def test_softmax_is_fp32_in_bf16():
    """Oracle: double precision. Scores that differ by less than bf16 resolves must still count."""
    q = torch.full((1, 1, 1, 16), 4.0).bfloat16()
    k = torch.full((1, 300, 1, 16), 4.0).bfloat16()
    k[:, 0, 0, 0] = 4.03125
    v = torch.zeros(1, 300, 1, 16).bfloat16()
    v[:, 0] = 256.0
    actual = float(attend(q, k, v, None)[0, 0, 0, 0])
    scores = (q.double() @ k[0, :, 0].double().T).flatten() / 4
    assert actual == pytest.approx(float(scores.softmax(0)[0] * 256), rel=5e-3)


def test_a_row_that_sees_nothing_spoils_no_other():
    """Rows of padding may see no key at all; they must not turn others or gradients into NaN."""
    q, k, v = _inputs(4, 6, 4, 2)
    mask = _mask("causal", 4, 6).repeat(2, 1, 1)
    mask[1, 2] = False
    out = attend(q, k, v, mask)
    seeing = mask.any(-1)
    expected = attend(q, k, v, _mask("causal", 4, 6))
    assert torch.allclose(out[seeing], expected[seeing], atol=1e-6)
    out[seeing].sum().backward()
    assert all(bool(x.grad.isfinite().all()) for x in (q, k, v))


def test_document_borders():
    """Two rows: documents of 3 and 2 tokens, then one of 1 and one of 4."""
    starts = torch.tensor([[0, 0, 0, 3, 3], [0, 1, 1, 1, 1]], dtype=torch.int32)
    borders, longest = document_borders(starts)
    assert borders.tolist() == [0, 3, 5, 6, 10]
    assert longest == 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flash attention runs on GPUs only")
@pytest.mark.parametrize("window", [None, 3])
def test_documents_on_a_gpu(window):
    """Oracle: fp32 on the CPU."""
    q, k, v = (torch.randn(2, heads, 8, 32) for heads in (4, 2, 2))
    starts = torch.tensor([[0, 0, 0, 3, 3, 3, 3, 3], [0, 1, 1, 1, 1, 1, 1, 7]], dtype=torch.int32)
    expected = attend_documents(q, k, v, starts, window)
    low = (x.cuda().bfloat16() for x in (q, k, v))
    found = attend_documents(*low, starts.cuda(), window)
    assert float((found.float().cpu() - expected).abs().max()) < 0.05
