"""The C kernels against torch in fp32, on the same bf16 inputs: values and every gradient."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from openzaya.kernels.attention import attend_documents, attend_reference
from openzaya.kernels.cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from openzaya.kernels.experts import experts_reference, mix_experts
from openzaya.kernels.native.library import library, written_out
from openzaya.kernels.norm import merge, merge_norm, merge_reference, rms_norm, rms_norm_reference
from openzaya.kernels.weights import linear
from openzaya.model.cca import CCAttention
from openzaya.model.layout import build_layout
from tests.model.helpers import small_config
from tests.oracle import randomise

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")

BF16 = torch.bfloat16
ROUNDING = 8e-3
"""Relative error (in the Frobenius norm) of results that pass through bf16 two or three times."""


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Random numbers that bf16 holds exactly, in fp32."""
    return (scale * torch.randn(shape, generator=generator(seed))).to(BF16).float()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    size = float(expected.double().norm())
    return float((found.double() - expected.double()).norm()) / max(size, 1e-30)


def leaves(*tensors: torch.Tensor, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Copies with gradients of their own."""
    return [t.detach().to(dtype or t.dtype).clone().requires_grad_() for t in tensors]


def starts_of(batch: int, seq: int, borders: list[int]) -> torch.Tensor:
    """Starts of documents that begin at 0 and at the borders; every second row is one document."""
    starts = torch.zeros(batch, seq, dtype=torch.int32)
    for border in sorted(b for b in borders if b < seq):
        starts[::2, border:] = border
    return starts


@pytest.mark.parametrize("width", [32, 48, 100, 256])
@pytest.mark.parametrize("norm", [True, False])
def test_merge_and_norm(width, norm):
    stream, output = normal(2, 37, width, seed=1), normal(2, 37, width, seed=2)
    coefficients = [normal(width, seed=s) for s in (3, 4, 5)]
    gain = normal(width, seed=6)
    upstream = normal(2, 37, width, seed=7), normal(2, 37, width, seed=8)
    exact = leaves(stream, output, *coefficients, gain)
    merged = merge_reference(*exact[:5])
    expected = [merged, rms_norm_reference(merged, exact[5], 1e-5, torch.float32)]
    found_in = leaves(stream, output, *coefficients, gain)
    low = found_in[1].to(BF16)
    if norm:
        found = list(merge_norm(found_in[0], low, *found_in[2:], 1e-5))
        assert found[1].dtype == BF16
    else:
        found, expected = [merge(found_in[0], low, *found_in[2:5])], expected[:1]
    assert found[0].dtype == torch.float32
    for a, b in zip(found, expected, strict=True):
        assert error(a, b) < ROUNDING
    torch.autograd.backward(expected, list(upstream[: len(expected)]))
    torch.autograd.backward(found, [g.to(f.dtype) for g, f in zip(upstream, found, strict=False)])
    for a, b in zip(found_in[: 6 if norm else 5], exact, strict=False):
        assert error(a.grad, b.grad) < ROUNDING


def test_norm_alone():
    x, gain = normal(3, 5, 64, seed=1), normal(64, seed=2)
    a, b = leaves(x, gain), leaves(x, gain)
    found = rms_norm(a[0], a[1], 1e-5, BF16)
    expected = rms_norm_reference(b[0], b[1], 1e-5, torch.float32)
    assert torch.equal(found, expected.to(BF16))
    upstream = normal(3, 5, 64, seed=3)
    found.backward(upstream.to(BF16))
    expected.backward(upstream)
    assert error(a[0].grad, b[0].grad) < 1e-5
    assert error(a[1].grad, b[1].grad) < 1e-5


@pytest.mark.parametrize("seq", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize(("heads", "kv", "dim"), [(2, 2, 32), (4, 1, 64), (4, 2, 96), (2, 1, 256)])
@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("borders", [None, [1, 2, 63, 64, 65, 130]])
def test_attention(seq, heads, kv, dim, window, borders):
    q = normal(2, heads, seq, dim, seed=1)
    k, v = (normal(2, kv, seq, dim, seed=s) for s in (2, 3))
    starts = None if borders is None else starts_of(2, seq, borders)
    place = torch.arange(seq)
    mask = (place <= place[:, None])[None].expand(2, -1, -1)
    if starts is not None:
        mask = mask & (place >= starts[..., None])
    if window is not None:
        mask = mask & (place > place[:, None] - window)
    exact = leaves(q, k, v)
    expected = attend_reference(*(x.transpose(1, 2) for x in exact), mask)
    given = leaves(q, k, v, dtype=BF16)
    found = attend_documents(*given, starts, window)
    assert error(found, expected) < ROUNDING
    upstream = normal(*expected.shape, seed=4)
    expected.backward(upstream)
    found.backward(upstream.to(BF16))
    # Rounding of the whole is the yardstick: with one key in sight dq and dk are zero.
    size = sum(float(x.grad.square().sum()) for x in exact) ** 0.5
    for a, b in zip(given, exact, strict=True):
        assert float((a.grad.float() - b.grad).norm()) < ROUNDING * size


def test_a_query_sees_nothing_of_other_documents():
    """Bit for bit, whatever stands in the document before."""
    q, k, v = (normal(1, 2, 130, 32, seed=s).to(BF16) for s in (1, 2, 3))
    starts = starts_of(1, 130, [70])
    whole = attend_documents(q, k, v, starts, None)
    k[:, :, :70], v[:, :, :70] = 30.0, 1e6
    changed = attend_documents(q, k, v, starts, None)
    assert torch.equal(changed[:, 70:], whole[:, 70:])


@pytest.mark.parametrize(("experts", "tokens"), [(1, 70), (2, 64), (4, 333), (64, 130)])
@pytest.mark.parametrize("identity", [False, True])
@pytest.mark.parametrize("load", ["even", "one expert", "all skip"])
def test_experts(experts, tokens, identity, load):
    hidden, inner = 64, 96
    x = normal(tokens, hidden, seed=1)
    gate_up = normal(experts, 2 * inner, hidden, seed=2, scale=0.2)
    down = normal(experts, hidden, inner, seed=3, scale=0.2)
    weight = torch.rand(tokens, generator=generator(4))
    index = torch.randint(0, experts + 1, (tokens,), generator=generator(5))
    if load != "even":
        index.fill_(experts if load == "all skip" else experts - 1)
    exact = leaves(x, weight, gate_up, down)
    out = experts_reference(exact[0], index, exact[2], exact[3])
    if identity:
        out = torch.where((index == experts)[:, None], exact[0], out)
    expected = out * exact[1][:, None]
    given = leaves(x, weight, gate_up, down)
    low = given[0].to(BF16)
    found = mix_experts(low, index, given[1], given[2], given[3], identity)
    assert found.dtype == BF16
    assert error(found, expected) < 2 * ROUNDING
    upstream = normal(tokens, hidden, seed=6)
    expected.backward(upstream)
    found.backward(upstream.to(BF16))
    for a, b in zip(given, exact, strict=True):
        assert error(a.grad, torch.zeros_like(b) if b.grad is None else b.grad) < 2 * ROUNDING
    idle = [e for e in range(experts) if not (index == e).any()]
    assert not given[2].grad[idle].any()
    assert not given[3].grad[idle].any()


def test_frozen_experts_get_no_gradient():
    x = normal(80, 32, seed=1).to(BF16).requires_grad_()
    gate_up, down = normal(2, 64, 32, seed=2), normal(2, 32, 32, seed=3)
    index = torch.arange(80) % 2
    mix_experts(x, index, torch.ones(80), gate_up, down, False).sum().backward()
    assert x.grad is not None
    assert gate_up.grad is None


@pytest.mark.parametrize(("tokens", "vocab", "width"), [(1, 65, 32), (100, 300, 64), (300, 8, 96)])
@pytest.mark.parametrize("ignored", ["some", "all"])
def test_cross_entropy(tokens, vocab, width, ignored):
    hidden, weight = normal(tokens, width, seed=1), normal(vocab, width, seed=2)
    targets = torch.randint(0, vocab, (tokens,), generator=generator(3))
    targets[slice(1, None, 3) if ignored == "some" else slice(None)] = -100
    exact, given = leaves(hidden, weight), leaves(hidden, weight)
    expected = linear_cross_entropy_reference(*exact, targets)
    found = linear_cross_entropy(given[0].to(BF16), given[1], targets)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    (expected / 7).backward()
    (found / 7).backward()
    for a, b in zip(given, exact, strict=True):
        assert error(a.grad, b.grad) < ROUNDING
    with torch.no_grad():
        again = linear_cross_entropy(given[0].to(BF16), given[1], targets)
    assert torch.equal(again, found.detach())


def test_a_target_outside_the_vocabulary_is_an_error():
    hidden, weight = normal(4, 32).to(BF16), normal(10, 32)
    with pytest.raises(IndexError, match="vocabulary of 10"):
        linear_cross_entropy(hidden, weight, torch.tensor([1, 2, 10, 3]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_reach_the_loss(bad):
    """The trainer stops on such a loss."""
    hidden, weight = normal(70, 32).to(BF16), normal(10, 32)
    hidden[3, 5] = bad
    assert not bool(linear_cross_entropy(hidden, weight, torch.arange(70) % 10).isfinite())
    q = normal(1, 2, 70, 32).to(BF16)
    q[0, 0, 3, 5] = float("nan")
    assert bool(attend_documents(q, q, q, None, None).isnan().any())


def test_linear_with_stacked_weights():
    x = normal(3, 7, 64, seed=1)
    parts = [normal(rows, 64, seed=rows) for rows in (32, 16, 8)]
    exact, given = leaves(x, *parts), leaves(x, *parts)
    expected = F.linear(exact[0], torch.cat(exact[1:]))
    found = linear(given[0].to(BF16), *given[1:])
    upstream = normal(3, 7, 56, seed=9)
    expected.backward(upstream)
    found.backward(upstream.to(BF16))
    assert error(found, expected) < ROUNDING
    for a, b in zip(given, exact, strict=True):
        assert a.grad.dtype == torch.float32
        assert error(a.grad, b.grad) < ROUNDING


CCA = {
    "groups of 2": {},
    "one kv head": {"num_key_value_heads": 1},
    "no groups": {"num_key_value_heads": 4},
    "head of 64": {"head_dim": 64, "num_attention_heads": 2},
    "head of 96": {"head_dim": 96, "num_attention_heads": 2, "num_key_value_heads": 1},
    "no rotation": {"partial_rotary_factor": 0.0},
    "full rotation": {"partial_rotary_factor": 1.0},
}


@pytest.mark.parametrize("changes", CCA.values(), ids=CCA.keys())
@pytest.mark.parametrize("seq", [1, 2, 65, 130])
@pytest.mark.parametrize("borders", [None, [1, 2, 64, 65, 66, 100]])
def test_cca(changes, seq, borders):
    """Oracle: the attention block written out in fp32."""
    config = small_config(hidden_size=64, **{"head_dim": 32, **changes})
    module = CCAttention(config, "hybrid")
    randomise(module, 1)
    x, upstream = normal(2, seq, 64, seed=2), normal(2, seq, 64, seed=3)
    positions = None
    if borders is not None:
        positions = torch.arange(seq) - starts_of(2, seq, borders).long()

    def run(dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
        module.zero_grad()
        (given,) = leaves(x, dtype=dtype)
        layout = build_layout(config, (2, seq), x.device, dtype, positions)
        out = module(given, layout, None)
        out.backward(upstream.to(dtype))
        return out.detach(), [given.grad, *(p.grad.clone() for p in module.parameters())]

    expected, exact = run(torch.float32)
    found, gradients = run(BF16)
    with written_out():
        plain, plain_gradients = run(BF16)
    assert error(found, expected) < 1.5 * error(plain, expected) + 1e-3
    # A single key in sight leaves q and k with gradients of nothing but rounding.
    floor = 1e-3 * max(float(g.norm()) for g in exact)
    for a, b, other in zip(gradients, exact, plain_gradients, strict=True):
        off, allowed = ((g.float() - b).norm() for g in (a, other))
        assert float(off) < 1.5 * float(allowed) + floor


def test_results_do_not_depend_on_chance():
    """Bit for bit in two runs; with another number of threads, up to the order of sums."""
    hidden, weight = normal(500, 64, seed=1).to(BF16), normal(300, 64, seed=2)
    targets = torch.randint(0, 300, (500,), generator=generator(3))

    def run() -> list[torch.Tensor]:
        given = leaves(hidden, weight)
        loss = linear_cross_entropy(*given, targets)
        loss.backward()
        return [loss.detach(), *(g.grad for g in given)]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        first, second = run(), run()
        torch.set_num_threads(1)
        single = run()
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(error(a, b) < 4e-3 for a, b in zip(single, first, strict=True))


SCRIPT = """
import torch
from openzaya.kernels.native.library import library
from openzaya.kernels.weights import linear
print(library() is not None, float(linear(torch.ones(1, 2).bfloat16(), torch.ones(3, 2)).sum()))
"""


@pytest.mark.parametrize("how", ["switched off", "no compiler"])
def test_without_kernels_torch_computes(how, tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    if how == "switched off":
        environment["OPENZAYA_NATIVE"] = "0"
    else:
        environment["PATH"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "6.0"]
    assert not list(tmp_path.iterdir())
