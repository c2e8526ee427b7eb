"""Grouped experts against one expert after the other, and that against one token at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from openzaya.kernels.experts import FEW_TOKENS, ROW_BUCKET, experts, experts_reference
from tests.oracle import relative_error

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def _inputs(tokens: int, count: int, hidden: int, inner: int, dtype=torch.float32):
    generator = torch.Generator().manual_seed(tokens + 7 * count)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype).requires_grad_()
    gate_up = torch.randn(count, 2 * inner, hidden, generator=generator) / hidden**0.5
    down = torch.randn(count, hidden, inner, generator=generator) / inner**0.5
    index = torch.randint(0, count + 1, (tokens,), generator=generator)
    return x, index, gate_up.requires_grad_(), down.requires_grad_()


def _compare(dtype: torch.dtype, tokens: int, index: torch.Tensor | None = None, **shape) -> None:
    results = []
    for function in (experts, experts_reference):
        x, random_index, gate_up, down = _inputs(tokens, **shape, dtype=dtype)
        chosen = random_index if index is None else index
        out = function(x, chosen, gate_up, down)
        assert out.dtype == dtype
        assert not out[chosen >= shape["count"]].any(), "a skipped token has an output"
        out.float().square().sum().backward()
        results.append((out.float(), x.grad.float(), gate_up.grad, down.grad))
    for actual, expected in zip(*results, strict=True):
        assert bool(actual.isfinite().all())
        assert relative_error(actual, expected) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("tokens", [1, 5, FEW_TOKENS - 1, FEW_TOKENS, 3 * ROW_BUCKET + 1, 500])
@pytest.mark.parametrize("count", [1, 2, 16])
def test_against_the_reference(dtype, tokens, count):
    """Oracle: `experts_reference`, values and gradients."""
    _compare(dtype, tokens, count=count, hidden=32, inner=48)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("hidden", "inner"), [(31, 48), (32, 45), (30, 7), (34, 34), (36, 4)])
def test_sizes_that_are_not_aligned(dtype, hidden, inner):
    """Grouped products need rows of a multiple of 16 bytes; others must work as well."""
    _compare(dtype, 130, count=3, hidden=hidden, inner=inner)


@pytest.mark.parametrize("tokens", [10, 200])
@pytest.mark.parametrize("idle", [0, 1, 3])
def test_an_idle_expert(idle, tokens):
    """Oracle: the reference; the idle expert's gradient is zero."""
    index = torch.arange(tokens) % 5
    index[index == idle] = 4
    _compare(torch.float32, tokens, index, count=4, hidden=32, inner=16)
    x, _, gate_up, down = _inputs(tokens, 4, 32, 16)
    experts(x, index, gate_up, down).sum().backward()
    for weight in (gate_up, down):
        assert not weight.grad[idle].any()
        assert all(bool(weight.grad[i].any()) for i in range(4) if i != idle)


@pytest.mark.parametrize("load", [ROW_BUCKET - 1, ROW_BUCKET, ROW_BUCKET + 1])
def test_loads_at_the_border_of_a_bucket(load):
    """Oracle: the reference, with expert loads just around the padding's step."""
    index = torch.cat([torch.full((load,), 1), torch.full((load,), 3), torch.full((3,), 4)])
    _compare(torch.float32, len(index), index, count=4, hidden=32, inner=16)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("tokens", [1, FEW_TOKENS - 1, FEW_TOKENS, 300])
@pytest.mark.parametrize("inner", [16, 17])
def test_every_token_skips(dtype, tokens, inner):
    """Zero output; gradients are zero, not None (ranks must agree on what they reduce)."""
    x, index, gate_up, down = _inputs(tokens, 4, 32, inner, dtype)
    out = experts(x, torch.full_like(index, 4), gate_up, down)
    assert out.shape == x.shape
    assert out.dtype == dtype
    assert not out.any()
    (out * torch.ones((), requires_grad=True)).sum().backward()
    for weight in (gate_up, down):
        assert weight.grad is not None
        assert not weight.grad.any()
    assert x.grad is None or not x.grad.any()


@torch.no_grad()
def test_the_reference_against_single_tokens():
    """Oracle: silu(x Wg) * x Wu, times Wd, for each token alone."""
    x, index, gate_up, down = _inputs(20, 4, 12, 6)
    actual = experts_reference(x, index, gate_up, down)
    assert set(index.tolist()) == {0, 1, 2, 3, 4}
    for i, chosen in enumerate(index.tolist()):
        expected = torch.zeros(12)
        if chosen < 4:
            inner = F.silu(gate_up[chosen, :6] @ x[i]) * (gate_up[chosen, 6:] @ x[i])
            expected = down[chosen] @ inner
        assert torch.allclose(actual[i], expected, atol=1e-6)


@torch.no_grad()
def test_order_of_tokens_is_kept():
    """Oracle: permuting the tokens permutes the result."""
    x, index, gate_up, down = _inputs(200, 4, 32, 16)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    expected = experts(x, index, gate_up, down)[order]
    assert torch.allclose(experts(x[order], index[order], gate_up, down), expected, atol=1e-6)


def test_gradients_are_exact():
    """Oracle: finite differences in double precision, through the reference."""
    x, index, gate_up, down = (t.detach() for t in _inputs(6, 2, 4, 3))
    arguments = [t.double().requires_grad_() for t in (x, gate_up, down)]
    assert torch.autograd.gradcheck(
        lambda a, b, c: experts_reference(a, index, b, c), arguments, atol=1e-6
    )
