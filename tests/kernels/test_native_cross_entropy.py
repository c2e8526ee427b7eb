"""The LM head in C against torch's cross-entropy in double precision."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from openzaya.kernels.cross_entropy import IGNORE, linear_cross_entropy
from openzaya.kernels.native.library import written_out
from tests.kernels.native import check, exact, needs_kernels, normal

pytestmark = needs_kernels


def _inputs(tokens, vocab, width, scale=1.0):
    hidden = normal(tokens, tokens, width)
    # Rounded to bf16 as the kernel will, so that only its own errors are measured.
    weight = (scale * normal(vocab, vocab, width) / width**0.5).bfloat16().float()
    generator = torch.Generator().manual_seed(width)
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    targets[torch.rand(tokens, generator=generator) < 0.3] = IGNORE
    targets[-1] = vocab - 1
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def _reference(hidden, weight, targets):
    return F.cross_entropy(hidden @ weight.T, targets, ignore_index=IGNORE, reduction="sum")


def _compare(hidden, weight, targets, factor=1.0):
    loss = linear_cross_entropy(hidden, weight, targets)
    assert type(loss.grad_fn).__name__ == "_NativeLinearCrossEntropyBackward"
    assert loss.dtype == torch.float32
    precise = [exact(x) for x in (hidden, weight)]
    expected = _reference(*precise, targets)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    (factor * loss).backward()
    (factor * expected).backward()
    for a, b in zip((hidden, weight), precise, strict=True):
        assert a.grad.dtype == a.dtype
        check(a.grad, b.grad)


@pytest.mark.parametrize("vocab", [2, 63, 64, 65, 256, 257, 300, 513])
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 256, 257])
def test_sizes(tokens, vocab):
    _compare(*_inputs(tokens, vocab, 32))


@pytest.mark.parametrize("width", [32, 64, 96, 160])
def test_widths(width):
    _compare(*_inputs(70, 300, width), factor=1 / 3)


@pytest.mark.parametrize("width", [48, 100])
def test_a_width_without_a_kernel(width):
    hidden, weight, targets = _inputs(70, 65, width)
    loss = linear_cross_entropy(hidden, weight, targets)
    assert type(loss.grad_fn).__name__ == "_LinearCrossEntropyBackward"
    expected = _reference(hidden.double(), weight.double(), targets)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)


def test_no_targets_at_all():
    hidden, weight, targets = _inputs(70, 65, 32)
    loss = linear_cross_entropy(hidden, weight, torch.full_like(targets, IGNORE))
    loss.backward()
    assert float(loss.detach()) == 0
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_ignored_tokens_have_exactly_no_gradient():
    hidden, weight, targets = _inputs(130, 65, 32)
    linear_cross_entropy(hidden, weight, targets).backward()
    assert not hidden.grad[targets == IGNORE].any()
    assert bool(hidden.grad[targets != IGNORE].abs().amax(-1).gt(0).all())


@pytest.mark.parametrize("target", [65, 10**10, -1, -99, -101])
def test_a_target_outside_the_vocabulary(target):
    """As torch: an error, never a token that is left out in silence."""
    hidden, weight, targets = _inputs(70, 65, 32)
    targets[3] = target
    with pytest.raises(IndexError, match=f"target {target} .* vocabulary of 65"):
        linear_cross_entropy(hidden, weight, targets)
    with pytest.raises(IndexError):
        F.cross_entropy(hidden @ weight.bfloat16().T, targets)


@pytest.mark.parametrize(
    "change",
    [
        lambda h, w, t: (h, w, t.int()),
        lambda h, w, t: (h, w, t[:-1]),
        lambda h, w, t: (h, w[:, :-32], t),
    ],
    ids=["dtype", "targets", "width"],
)
def test_inputs_that_do_not_fit_are_refused(change):
    """The kernel would read past their ends."""
    with pytest.raises((ValueError, RuntimeError)):
        linear_cross_entropy(*change(*_inputs(70, 65, 64)))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_only_one_input_needs_a_gradient(frozen):
    hidden, weight, targets = _inputs(70, 65, 32)
    linear_cross_entropy(hidden, weight, targets).backward()
    expected = hidden.grad if frozen == "weight" else weight.grad
    inputs = [
        x.detach().requires_grad_(frozen != name)
        for name, x in (("hidden", hidden), ("weight", weight))
    ]
    linear_cross_entropy(*inputs, targets).backward()
    grads = [x.grad for x in inputs]
    assert torch.equal(grads[1 if frozen == "hidden" else 0], expected)
    assert grads[0 if frozen == "hidden" else 1] is None


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context):
    hidden, weight, targets = _inputs(70, 65, 32)
    expected = linear_cross_entropy(hidden, weight, targets).detach()
    with context():
        loss = linear_cross_entropy(hidden, weight, targets)
    assert loss.grad_fn is None
    assert torch.equal(loss, expected)


def test_inputs_that_are_not_contiguous():
    hidden, weight, targets = (x.detach() for x in _inputs(70, 65, 32))
    results = []
    for turn in (False, True):
        h, w = (
            (x.T.contiguous().T if turn else x.clone()).requires_grad_() for x in (hidden, weight)
        )
        t = torch.stack([targets, targets], 1)[:, 0] if turn else targets
        loss = linear_cross_entropy(h, w, t)
        loss.backward()
        results.append((loss, h.grad, w.grad))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_a_head_in_low_precision():
    hidden, weight, targets = _inputs(70, 65, 32)
    low = weight.detach().bfloat16().requires_grad_()
    loss = linear_cross_entropy(hidden, low, targets)
    loss.backward()
    assert low.grad.dtype == torch.bfloat16
    assert torch.equal(loss, linear_cross_entropy(hidden, weight, targets))


def test_large_logits():
    """Oracle: double precision. Logits of many thousands, as of a head that went astray."""
    for scale in (100.0, 1e4):
        _compare(*_inputs(130, 300, 32, scale))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("place", [(0, 0), (64, 31)])
def test_numbers_that_are_not_finite_come_out(which, value, place):
    hidden, weight, targets = (x.detach().clone() for x in _inputs(70, 65, 32))
    targets[64] = 64
    (hidden, weight)[which][place] = value
    targets[0] = 0
    loss = float(linear_cross_entropy(hidden, weight, targets))
    assert not math.isfinite(loss)


def test_an_infinite_hidden_state_without_target_is_ignored():
    """Oracle: the torch path. Padding carries no loss, whatever it holds."""
    hidden, weight, targets = (x.detach().clone() for x in _inputs(70, 65, 32))
    targets[3] = IGNORE
    hidden[3] = float("nan")
    loss = linear_cross_entropy(hidden, weight, targets)
    with written_out():
        expected = linear_cross_entropy(hidden, weight, targets)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
