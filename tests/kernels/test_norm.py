"""Normalisations: statistics in fp32, whatever comes in."""

from __future__ import annotations

import pytest
import torch

from openzaya.kernels.norm import (
    L2_FLOOR,
    l2_normalize,
    l2_normalize_reference,
    rms_norm,
    rms_norm_reference,
)
from tests.oracle import relative_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-2, 1.0, 300.0])
def test_rms_norm(dtype, size):
    """Oracle: double precision on the values as given. fp16 sums of squares would overflow."""
    x = (size * torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1))).to(dtype)
    weight = 1 + 0.3 * torch.randn(64, generator=torch.Generator().manual_seed(2))
    exact = x.double()
    expected = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    out = rms_norm(x, weight, 1e-5, torch.float32)
    assert out.dtype == torch.float32
    assert relative_error(out.double(), expected) < 1e-6
    low = rms_norm(x, weight, 1e-5, torch.bfloat16)
    assert torch.equal(low, out.bfloat16()), "rounded more than once"


def test_rms_norm_agrees_with_torch():
    """Oracle: torch's rms_norm, values and gradients."""
    x = torch.randn(4, 32, requires_grad=True)
    weight = torch.rand(32, requires_grad=True)
    rms_norm(x, weight, 1e-5, torch.float32).square().sum().backward()
    x2, weight2 = x.detach().requires_grad_(), weight.detach().requires_grad_()
    torch.nn.functional.rms_norm(x2, (32,), weight2, 1e-5).square().sum().backward()
    assert relative_error(x.grad, x2.grad) < 1e-5
    assert relative_error(weight.grad, weight2.grad) < 1e-5


def test_rms_norm_of_zeros():
    x = torch.zeros(2, 8, requires_grad=True)
    out = rms_norm(x, torch.ones(8), 1e-5, torch.float32)
    out.sum().backward()
    assert not out.any()
    assert bool(x.grad.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-4, 1e-2, 1.0, 3e4])
def test_l2_normalize(dtype, size):
    """Oracle: double precision. The floor is fp32's even for bf16 input, whose own would be
    0.0078, and large fp16 vectors do not overflow."""
    x = torch.randn(7, 3, 16, generator=torch.Generator().manual_seed(3)).clamp(-2, 2)
    x = (size * x).to(dtype)
    expected = 4 * x.double() / x.double().norm(dim=-1, keepdim=True)
    out = l2_normalize(x)
    assert out.dtype == torch.float32
    assert relative_error(out.double(), expected) < 1e-6


@pytest.mark.parametrize("below", [False, True])
def test_gradients_agree_with_the_references(below):
    """Oracle: autograd through the forms that are written out, on both sides of the floor."""
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(5, 3, 16, generator=generator)
    if below:
        x[0] *= 1e-9
    weight = torch.randn(16, generator=generator)
    g = torch.randn(5, 3, 16, generator=generator)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    l2_normalize(a).backward(g)
    l2_normalize_reference(b).backward(g)
    assert relative_error(a.grad[1:], b.grad[1:]) < 1e-5
    assert relative_error(a.grad[0], b.grad[0]) < 1e-5
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    u, v = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    rms_norm(a, u, 1e-5, torch.float32).backward(g)
    rms_norm_reference(b, v, 1e-5, torch.float32).backward(g)
    assert relative_error(a.grad, b.grad) < 1e-5
    assert relative_error(u.grad, v.grad) < 1e-5


def test_l2_normalize_below_the_floor():
    """Shorter vectors than the floor shrink with their length instead of exploding."""
    x = torch.zeros(1, 4)
    x[0, 0] = L2_FLOOR / 8
    assert torch.allclose(l2_normalize(x)[0, 0], torch.tensor(0.25))


def test_l2_normalize_of_zero():
    """Zero in, zero out, and a finite gradient."""
    x = torch.zeros(2, 8, requires_grad=True)
    out = l2_normalize(x)
    out.sum().backward()
    assert not out.any()
    assert bool(x.grad.isfinite().all())


def test_l2_normalize_gradient_is_orthogonal():
    """Oracle: the length is fixed, so a gradient along the vector must vanish."""
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(4)).requires_grad_()
    target = torch.randn(6, 16, generator=torch.Generator().manual_seed(5))
    (l2_normalize(x) * target).sum().backward()
    cosine = torch.nn.functional.cosine_similarity(x.grad, x.detach())
    assert bool((cosine.abs() < 1e-5).all())
    assert bool(x.grad.abs().gt(1e-3).any())
