"""Merge and norm in C against double precision."""

from __future__ import annotations

import pytest
import torch

from openzaya.kernels.norm import merge, merge_norm, rms_norm
from tests.kernels.native import check, exact, needs_kernels, normal
from tests.oracle import relative_error

pytestmark = needs_kernels

EPS = 1e-5
SHAPES = [(1, 1, 32), (1, 2, 1), (2, 1, 7), (3, 5, 48), (1, 65, 100), (2, 63, 96), (4, 300, 32)]


def _inputs(*shape):
    width = shape[-1]
    stream = normal(1, *shape, dtype=torch.float32)
    output = normal(2, *shape)
    small = [1 + 0.3 * normal(i, width, dtype=torch.float32) for i in (3, 4, 5, 6)]
    return [x.requires_grad_() for x in (stream, output, *small)]


def _merge(stream, output, bias, residual_scale, output_scale):
    return bias + stream * residual_scale + output * output_scale


def _norm(x, gain):
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * gain


def _check_gradients(inputs, precise):
    for a, b in zip(inputs, precise, strict=True):
        assert a.grad.dtype == a.dtype
        check(a.grad, b.grad, 4e-3 if a.dtype == torch.bfloat16 else 2e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_merge_and_norm(shape):
    inputs = _inputs(*shape)
    merged, normed = merge_norm(*inputs, EPS)
    assert type(merged.grad_fn).__name__ == "_MergeNormBackward"
    assert (merged.dtype, normed.dtype) == (torch.float32, torch.bfloat16)
    precise = [exact(x) for x in inputs]
    expected = _merge(*precise[:5])
    check(merged, expected, 1e-6)
    check(normed, _norm(expected, precise[5]), 4e-3)
    grads = normal(7, *shape, dtype=torch.float32), normal(8, *shape)
    torch.autograd.backward([merged, normed], list(grads))
    torch.autograd.backward([expected, _norm(expected, precise[5])], [g.double() for g in grads])
    _check_gradients(inputs, precise)


@pytest.mark.parametrize("which", [0, 1])
def test_only_one_of_both_results_is_used(which):
    inputs = _inputs(3, 5, 48)
    precise = [exact(x) for x in inputs]
    merge_norm(*inputs, EPS)[which].float().square().sum().backward()
    expected = _merge(*precise[:5])
    (expected, _norm(expected, precise[5]))[which].square().sum().backward()
    if which == 0:
        precise[5].grad = torch.zeros_like(precise[5])
    for a, b in zip(inputs, precise, strict=True):
        check(a.grad, b.grad)


@pytest.mark.parametrize("shape", SHAPES)
def test_merge_alone(shape):
    inputs = _inputs(*shape)[:5]
    merged = merge(*inputs)
    assert type(merged.grad_fn).__name__ == "_MergeNormBackward"
    precise = [exact(x) for x in inputs]
    expected = _merge(*precise)
    check(merged, expected, 1e-6)
    grad = normal(7, *shape, dtype=torch.float32)
    merged.backward(grad)
    expected.backward(grad.double())
    _check_gradients(inputs, precise)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_alone(shape, dtype):
    x = normal(1, *shape, dtype=torch.float32).to(dtype).requires_grad_()
    gain = (1 + 0.3 * normal(2, shape[-1], dtype=torch.float32)).requires_grad_()
    normed = rms_norm(x, gain, EPS, torch.bfloat16)
    assert type(normed.grad_fn).__name__ == "_MergeNormBackward"
    precise = [exact(t) for t in (x, gain)]
    expected = _norm(*precise)
    check(normed, expected, 4e-3)
    grad = normal(3, *shape)
    normed.backward(grad)
    expected.backward(grad.double())
    _check_gradients([x, gain], precise)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-4, 1e4, 1e15])
def test_sizes(size):
    """Oracle: double precision, relative to the result; of zeros comes zero, not NaN."""
    x = (size * normal(1, 4, 48, dtype=torch.float32)).requires_grad_()
    gain = torch.ones(48, requires_grad=True)
    normed = rms_norm(x, gain, EPS, torch.bfloat16)
    precise = exact(x)
    expected = _norm(precise, gain.detach().double())
    normed.sum().backward()
    expected.sum().backward()
    assert relative_error(normed.double(), expected) < 4e-3
    assert bool(x.grad.isfinite().all())
    assert relative_error(x.grad.double(), precise.grad) < 1e-2 or size > 1


def test_no_merge_coefficient_needs_a_gradient():
    inputs = _inputs(3, 5, 48)
    frozen = [x.detach() for x in inputs[2:]]
    merged, normed = merge_norm(*inputs[:2], *frozen, EPS)
    (merged.sum() + normed.float().sum()).backward()
    assert all(x.grad is not None for x in inputs[:2])


def test_inputs_that_are_not_contiguous():
    inputs = [x.detach() for x in _inputs(3, 5, 48)]
    apart = [torch.stack([x, -x], dim=-1)[..., 0].requires_grad_() for x in inputs]
    assert not any(x.is_contiguous() for x in apart)
    results = []
    for arguments in (inputs, apart):
        arguments = [x.requires_grad_() for x in arguments]
        merged, normed = merge_norm(*arguments, EPS)
        (merged.sum() + normed.float().square().sum()).backward()
        results.append([merged, normed, *(x.grad for x in arguments)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_low_precision_parameters_and_stream():
    """A whole model cast to bf16 must not have its numbers read as fp32."""
    inputs = _inputs(3, 5, 48)
    low = [x.detach().bfloat16().requires_grad_() for x in inputs]
    merged, normed = merge_norm(*low, EPS)
    assert merged.dtype == torch.float32
    precise = [exact(x) for x in low]
    expected = _merge(*precise[:5])
    check(merged, expected, 1e-6)
    check(normed, _norm(expected, precise[5]), 4e-3)
    (merged.sum() + normed.float().sum()).backward()
    (expected.sum() + _norm(expected, precise[5]).sum()).backward()
    for a, b in zip(low, precise, strict=True):
        assert a.grad.dtype == torch.bfloat16
        check(a.grad, b.grad)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", range(6))
def test_numbers_that_are_not_finite_come_out(which, value):
    inputs = [x.detach() for x in _inputs(1, 3, 48)]
    inputs[which].view(-1)[5] = value
    merged, normed = merge_norm(*inputs, EPS)
    assert not bool(normed.isfinite().all())
    assert bool(merged.isfinite().all()) == (which == 5)
