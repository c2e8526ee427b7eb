"""Experts in C against each token alone through its expert, in double precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from openzaya.kernels.experts import FEW_TOKENS, mix_experts
from openzaya.kernels.native.library import written_out
from tests.kernels.native import check, exact, needs_kernels, normal

pytestmark = needs_kernels

GRADIENTS = ("x", "weight", "gate_up", "down")


def _inputs(tokens, count, hidden, inner):
    """Weights are bf16 numbers stored wide, so that only the kernel's own errors are measured."""
    x = normal(tokens, tokens, hidden)
    weight = torch.rand(tokens, generator=torch.Generator().manual_seed(tokens))
    gate_up = (normal(1, count, 2 * inner, hidden) / hidden**0.5).bfloat16().float()
    down = (normal(2, count, hidden, inner) / inner**0.5).bfloat16().float()
    return [t.requires_grad_() for t in (x, weight, gate_up, down)]


def _index(tokens, count, classes=None):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(
        0, count + 1 if classes is None else classes, (tokens,), generator=generator
    )


def _reference(x, index, weight, gate_up, down, identity):
    out = x * 0.0 if not identity else x
    for expert in range(gate_up.shape[0]):
        rows = (index == expert).nonzero().squeeze(-1)
        gate, up = (x[rows] @ gate_up[expert].T).chunk(2, -1)
        out = out.index_copy(0, rows, (F.silu(gate) * up) @ down[expert].T)
    return out * weight[:, None]


def _compare(index, count, hidden=32, inner=64, identity=False, native=True):
    inputs = _inputs(len(index), count, hidden, inner)
    x, weight, gate_up, down = inputs
    out = mix_experts(x, index, weight, gate_up, down, identity)
    assert (type(out.grad_fn).__name__ == "_NativeExpertsBackward") == native
    assert out.dtype == torch.bfloat16
    precise = [exact(t) for t in inputs]
    expected = _reference(precise[0], index, *precise[1:], identity)
    grad = normal(4, *out.shape)
    out.backward(grad)
    expected.backward(grad.double())
    check(out, expected)
    for a, b in zip(inputs, precise, strict=True):
        assert a.grad.dtype == a.dtype
        check(a.grad, b.grad)
    skipped = (index < 0) | (index >= count)
    if not identity:
        assert not out[skipped].any()
        assert not x.grad[skipped].any()
        assert not weight.grad[skipped].any()
    return gate_up.grad, down.grad


@pytest.mark.parametrize("count", [1, 2, 5, 64])
@pytest.mark.parametrize("tokens", [64, 65, 95, 96, 97, 127, 128, 300])
def test_sizes(tokens, count):
    _compare(_index(tokens, count), count)


@pytest.mark.parametrize(
    ("hidden", "inner"), [(32, 32), (64, 32), (32, 96), (96, 64), (128, 160), (160, 128)]
)
def test_widths(hidden, inner):
    _compare(_index(130, 3), 3, hidden, inner)


@pytest.mark.parametrize(("hidden", "inner"), [(48, 64), (32, 48), (100, 32), (32, 100)])
def test_widths_without_a_kernel(hidden, inner):
    _compare(_index(130, 3), 3, hidden, inner, native=False)


def test_few_tokens_have_no_kernel():
    _compare(_index(FEW_TOKENS - 1, 3), 3, native=False)


@pytest.mark.parametrize("identity", [False, True])
def test_what_the_skip_class_gives(identity):
    index = _index(200, 4)
    index[:3] = torch.tensor([-1, 5, 10**12])  # any class that is no expert
    _compare(index, 4, identity=identity)


def test_without_a_skip_class():
    _compare(_index(200, 4, classes=4), 4)


@pytest.mark.parametrize("identity", [False, True])
def test_every_token_skips(identity):
    for gradient in _compare(torch.full((70,), 4), 4, identity=identity):
        assert not gradient.any()


@pytest.mark.parametrize("expert", [0, 3, 7])
def test_every_token_goes_to_one_expert(expert):
    for gradient in _compare(torch.full((333,), expert), 8):
        busy = gradient.flatten(1).any(1)
        assert busy.tolist() == [i == expert for i in range(8)]


@pytest.mark.parametrize("load", [1, 31, 32, 33, 63, 64, 65, 128, 129])
def test_loads_at_the_border_of_a_block(load):
    index = torch.cat([torch.full((n,), e) for e, n in ((2, load), (0, 64), (3, load), (4, 2))])
    _compare(index, 4)


@pytest.mark.parametrize("frozen", [("gate_up", "down"), ("gate_up",), ("down",), ("x", "weight")])
def test_some_inputs_need_no_gradient(frozen):
    """As with adapters on frozen weights: the gradients of the others stay as they are."""
    inputs = _inputs(200, 4, 32, 64)
    index = _index(200, 4)
    x, weight, gate_up, down = inputs
    mix_experts(x, index, weight, gate_up, down, True).float().sum().backward()
    some = [
        t.detach().requires_grad_(name not in frozen)
        for name, t in zip(GRADIENTS, inputs, strict=True)
    ]
    x, weight, gate_up, down = some
    mix_experts(x, index, weight, gate_up, down, True).float().sum().backward()
    for name, t, whole in zip(GRADIENTS, some, inputs, strict=True):
        assert t.grad is None if name in frozen else torch.equal(t.grad, whole.grad)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context):
    x, weight, gate_up, down = _inputs(200, 4, 32, 64)
    index = _index(200, 4)
    expected = mix_experts(x, index, weight, gate_up, down, False)
    with context():
        assert torch.equal(mix_experts(x, index, weight, gate_up, down, False), expected)


def test_weights_in_low_precision_have_no_kernel():
    """Served models hold their experts in bf16."""
    x, weight, gate_up, down = _inputs(200, 4, 32, 64)
    index = _index(200, 4)
    out = mix_experts(x, index, weight, gate_up.bfloat16(), down.bfloat16(), False)
    check(out, mix_experts(x, index, weight, gate_up, down, False).double())


def test_routing_weights_in_low_precision_have_no_kernel():
    """The kernel would take their bits for fp32 numbers."""
    x, weight, gate_up, down = _inputs(200, 4, 32, 64)
    index = _index(200, 4)
    out = mix_experts(x, index, weight.bfloat16(), gate_up, down, False)
    check(
        out,
        _reference(
            *(t.double() for t in (x,)),
            index,
            weight.bfloat16().double(),
            gate_up.double(),
            down.double(),
            False,
        ),
    )


def test_inputs_that_are_not_contiguous():
    index = _index(200, 4)
    plain = [t.detach() for t in _inputs(200, 4, 32, 64)]
    apart = [torch.stack([t, -t], dim=-1)[..., 0] for t in plain]
    index_apart = torch.stack([index, index], 1)[:, 0]
    results = []
    for arguments, chosen in ((plain, index), (apart, index_apart)):
        x, weight, gate_up, down = (t.requires_grad_() for t in arguments)
        out = mix_experts(x, chosen, weight, gate_up, down, True)
        out.float().square().sum().backward()
        results.append([out, *(t.grad for t in (x, weight, gate_up, down))])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", range(4))
def test_numbers_that_are_not_finite_come_out(which, value):
    """And they stay with the tokens that met them: experts do not mix tokens."""
    inputs = [t.detach() for t in _inputs(200, 4, 32, 64)]
    index = torch.arange(200) % 4
    inputs[which].view(-1)[0] = value  # of token 0, or of expert 0
    x, weight, gate_up, down = inputs
    out = mix_experts(x, index, weight, gate_up, down, False)
    assert not bool(out[0].isfinite().all())
    with written_out():
        expected = mix_experts(x, index, weight, gate_up, down, False)
    assert torch.equal(out.isfinite().all(-1), expected.isfinite().all(-1))


def test_gates_of_any_size():
    """Oracle: double precision. A gate of plus or minus hundreds opens or shuts, and no more."""
    x, weight, gate_up, down = (t.detach() for t in _inputs(130, 3, 32, 64))
    inputs = [t.requires_grad_() for t in (x * 300, weight, gate_up, down)]
    index = _index(130, 3)
    out = mix_experts(inputs[0], index, *inputs[1:], False)
    out.float().sum().backward()
    precise = [exact(t) for t in inputs]
    expected = _reference(precise[0], index, *precise[1:], False)
    expected.sum().backward()
    check(out, expected)
    for a, b in zip(inputs, precise, strict=True):
        check(a.grad, b.grad, 0.02)
