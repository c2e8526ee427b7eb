"""Attention in C against a softmax in double precision over the tokens that each token sees."""

from __future__ import annotations

import math

import pytest
import torch

from openzaya.kernels.attention import attend_documents
from openzaya.kernels.native.library import written_out
from tests.kernels.native import PACKINGS, check, exact, needs_kernels, normal, starts

pytestmark = needs_kernels


def _reference(q, k, v, begins, window):
    group, seq = q.shape[1] // k.shape[1], q.shape[2]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    place = torch.arange(seq)
    seen = place[None] <= place[:, None]
    if window is not None:
        seen = seen & (place[None] > place[:, None] - window)
    seen = seen[None] if begins is None else seen & (place >= begins[..., None])
    scores = (q @ k.mT) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    return (weights @ v).transpose(1, 2)


def _inputs(batch, heads, kv_heads, seq, dim):
    q = normal(seq, batch, heads, seq, dim)
    k, v = (normal(seq + i, batch, kv_heads, seq, dim) for i in (1, 2))
    return [x.requires_grad_() for x in (q, k, v)]


def _compare(batch, heads, kv_heads, seq, dim, begins=None, window=None):
    inputs = _inputs(batch, heads, kv_heads, seq, dim)
    out = attend_documents(*inputs, begins, window)
    assert type(out.grad_fn).__name__ == "_NativeAttentionBackward"
    assert out.dtype == torch.bfloat16
    precise = [exact(x) for x in inputs]
    expected = _reference(*precise, begins, window)
    grad = normal(seq + 3, *out.shape)
    out.backward(grad)
    expected.backward(grad.double())
    check(out, expected)
    for a, b in zip(inputs, precise, strict=True):
        check(a.grad, b.grad)


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("seq", [1, 2, 63, 64, 65, 130])
def test_lengths_and_head_sizes(seq, dim):
    _compare(2, 4, 2, seq, dim)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (4, 1), (8, 1), (8, 2), (12, 3)])
def test_groups(heads, kv_heads):
    _compare(1, heads, kv_heads, 70, 32)


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 66, 128, 129, 192, 193, 1000])
def test_windows(window):
    _compare(1, 4, 2, 193, 32, window=window)


@pytest.mark.parametrize("window", [None, 1, 3, 64, 65])
@pytest.mark.parametrize("name", PACKINGS)
def test_packed_documents(name, window):
    begins = starts(PACKINGS[name])
    _compare(*begins.shape[:1], 4, 2, begins.shape[1], 32, begins, window)


@pytest.mark.parametrize("name", PACKINGS)
def test_no_document_sees_another(name):
    """Whatever another document holds, even the largest numbers: not one bit changes."""
    for row, lengths in enumerate(PACKINGS[name]):
        begins = starts([lengths])
        clean = [x[row : row + 1].detach() for x in _inputs(3, 2, 1, begins.shape[1], 32)]
        start = sum(lengths[: len(lengths) // 2])
        part = slice(start, start + lengths[len(lengths) // 2])
        other = [x * 1e4 for x in clean]
        for x, y in zip(other, clean, strict=True):
            x[:, :, part] = y[:, :, part]
        results = []
        for inputs in (clean, other):
            inputs = [x.requires_grad_() for x in inputs]
            out = attend_documents(*inputs, begins, None)
            out[:, part].float().square().sum().backward()
            results.append([out[:, part], *(x.grad[:, :, part] for x in inputs)])
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)


def test_a_head_size_without_a_kernel():
    inputs = _inputs(1, 2, 1, 9, 48)
    out = attend_documents(*inputs, None, 3)
    assert type(out.grad_fn).__name__ != "_NativeAttentionBackward"
    check(out, _reference(*(exact(x) for x in inputs), None, 3))


def test_inputs_that_are_not_contiguous():
    """Tokens before heads, as the projections of plain attention come."""
    whole = [x.detach().transpose(1, 2).contiguous() for x in _inputs(2, 4, 2, 70, 32)]
    results = []
    for view in (True, False):
        leaves = [x.clone().requires_grad_() for x in whole]
        inputs = [x.transpose(1, 2) for x in leaves]
        out = attend_documents(*(x if view else x.contiguous() for x in inputs), None, None)
        # The gradient of a sum is expanded, not contiguous either.
        (out.float().sum() if view else (out * torch.ones_like(out)).float().sum()).backward()
        results.append([out, *(x.grad for x in leaves)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context):
    inputs = _inputs(1, 2, 1, 70, 32)
    expected = attend_documents(*inputs, None, 5)
    with context():
        assert torch.equal(attend_documents(*inputs, None, 5), expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_numbers_that_are_not_finite_come_out(which, value):
    """The trainer stops on a loss that is not finite; a softmax must not swallow them."""
    inputs = [x.detach() for x in _inputs(1, 2, 1, 70, 32)]
    inputs[which][0, 0, 66, 3] = value
    out = attend_documents(*inputs, None, None)
    with written_out():
        expected = attend_documents(*inputs, None, None)
    assert bool(out.isfinite().all()) == bool(expected.isfinite().all())
    if math.isnan(value):
        assert not bool(out[0, 66, 0].isfinite().all())


def test_scores_of_any_size():
    """Oracle: double precision. One key wins by thousands, or all are alike."""
    for scale in (0.0, 1e-20, 30.0, 1e4):
        q, k, v = (x.detach() for x in _inputs(1, 2, 1, 130, 64))
        q, k = q * scale, k * min(scale, 30.0)
        inputs = [x.requires_grad_() for x in (q, k, v)]
        out = attend_documents(*inputs, None, None)
        out.float().square().sum().backward()
        check(out, _reference(*(x.double() for x in inputs), None, None), 0.03)
        assert all(bool(x.grad.isfinite().all()) for x in inputs)
