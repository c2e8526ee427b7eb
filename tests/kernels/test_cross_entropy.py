"""The fused LM head against torch's cross-entropy on all logits."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from openzaya.kernels import cross_entropy
from openzaya.kernels.cross_entropy import (
    CHUNK,
    IGNORE,
    linear_cross_entropy,
    linear_cross_entropy_reference,
)
from tests.oracle import relative_error

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def _inputs(tokens: int, dtype=torch.float32, width: int = 16, vocab: int = 37):
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    targets[torch.rand(tokens, generator=generator) < 0.3] = IGNORE
    return hidden, weight, targets


def _compare(hidden, weight, targets, tolerance: float, scale: float = 1.0) -> None:
    results = []
    for function in (linear_cross_entropy, linear_cross_entropy_reference):
        h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        loss = function(h, w, targets)
        assert loss.dtype == torch.float32
        (scale * loss).backward()
        assert h.grad.dtype == h.dtype
        assert w.grad.dtype == w.dtype
        results.append((loss, h.grad.float(), w.grad.float()))
    for actual, expected in zip(*results, strict=True):
        assert relative_error(actual, expected) < tolerance


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("tokens", [1, 7, 50])
def test_against_the_reference(dtype, tokens):
    """Oracle: torch's cross-entropy, value and gradients, also scaled as by a mean."""
    inputs = _inputs(tokens, dtype)
    _compare(*inputs, TOLERANCES[dtype])
    _compare(*inputs, TOLERANCES[dtype], scale=1 / 3)


@pytest.mark.parametrize("tokens", [7, 8, 9, 15, 16, 17])
def test_chunk_borders(tokens, monkeypatch):
    """Oracle: the reference, with token counts just around multiples of the chunk."""
    monkeypatch.setattr(cross_entropy, "CHUNK", 8)
    _compare(*_inputs(tokens), 1e-5)


def test_more_tokens_than_a_chunk_without_any_patch():
    _compare(*_inputs(CHUNK + 3, width=8, vocab=11), 1e-5)


def test_a_chunk_without_any_target(monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK", 4)
    hidden, weight, targets = _inputs(12)
    targets[4:8] = IGNORE
    _compare(hidden, weight, targets, 1e-5)


def test_no_targets_at_all():
    """Nothing to learn: loss and gradients are exactly zero, not NaN."""
    hidden, weight, targets = _inputs(9)
    loss = linear_cross_entropy(hidden, weight, torch.full_like(targets, IGNORE))
    loss.backward()
    assert float(loss.detach()) == 0
    assert not hidden.grad.any()
    assert not weight.grad.any()
    assert float(linear_cross_entropy(hidden[:0], weight, targets[:0]).detach()) == 0


def test_ignored_tokens_have_exactly_no_gradient():
    hidden, weight, targets = _inputs(30)
    linear_cross_entropy(hidden, weight, targets).backward()
    assert not hidden.grad[targets == IGNORE].any()
    assert bool(hidden.grad[targets != IGNORE].abs().amax(-1).gt(0).all())


def test_large_logits_stay_finite():
    """Oracle: the reference. Logits of several hundred overflow an exponential that is not
    shifted."""
    hidden, weight, targets = _inputs(20)
    _compare(hidden * 100, weight, targets, 1e-5)


def test_only_one_input_needs_a_gradient():
    hidden, weight, targets = _inputs(20)
    linear_cross_entropy(hidden, weight.detach(), targets).backward()
    assert hidden.grad is not None
    hidden, weight, targets = _inputs(20)
    linear_cross_entropy(hidden.detach(), weight, targets).backward()
    assert weight.grad is not None


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_forms_no_gradient(context):
    """Oracle: the operation count of the logits alone. Gradients would cost three times as much
    and a second fp32 head in memory."""
    hidden, weight, targets = _inputs(20)
    with context(), FlopCounterMode(display=False) as counter:
        loss = linear_cross_entropy(hidden, weight, targets)
    expected = linear_cross_entropy_reference(hidden, weight, targets)
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert counter.get_total_flops() == 2 * hidden.shape[0] * weight.numel()
