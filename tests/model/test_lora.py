"""Adapters kept beside the weights and merged into them."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from openzaya.errors import UserError
from openzaya.model.lora import (
    Adapter,
    Pair,
    attach,
    attached,
    detach,
    is_dora,
    kind_of,
    merge,
    merged,
    new_adapter,
    scale_of,
    with_magnitudes,
)
from openzaya.model.model import Zaya
from openzaya.model.precision import cast_for_inference
from tests.model.helpers import plain_logits, small_config, small_model, tokens_for
from tests.oracle import relative_error

KINDS = ("attention", "experts", "router")


def random_adapter(model: Zaya, targets: tuple[str, ...] = KINDS, rank: int = 3) -> Adapter:
    adapter = new_adapter(model.config, targets, rank, alpha=5.0, seed=1)
    generator = torch.Generator().manual_seed(2)
    for pair in adapter.pairs.values():
        pair.b = 0.2 * torch.randn(pair.b.shape, generator=generator)
    return adapter


def loss_of(model: Zaya, tokens: Tensor) -> Tensor:
    return model.loss(model(tokens).hidden, tokens.roll(-1, 1))


def test_a_delta_is_scaled_b_times_a_per_expert() -> None:
    a, b = torch.randn(4, 3, 6), torch.randn(4, 5, 3)
    pair = Pair(a, b, 0.7)
    assert pair.rank == 3
    assert pair.shape == (4, 5, 6)
    expected = 0.7 * torch.einsum("eor,eri->eoi", b.double(), a.double())
    assert relative_error(pair.delta().double(), expected) < 1e-6
    one = Pair(a[1], b[1], 0.7)
    assert relative_error(one.delta().double(), expected[1]) < 1e-6
    assert Pair(a.bfloat16(), b.bfloat16(), 1.0).delta().dtype == torch.float32


def test_scales() -> None:
    assert scale_of(4, 6) == 1.5
    assert scale_of(9, 6, use_rslora=True) == 2.0


@pytest.mark.parametrize("targets", [("attention",), ("experts",), ("router",), KINDS])
def test_kept_equals_merged_bit_for_bit(targets: tuple[str, ...]) -> None:
    model = small_model()
    tokens = tokens_for(model, 2, 9)
    plain = plain_logits(model, tokens)
    adapter = random_adapter(model, targets)
    together = copy.deepcopy(model)
    merge(together, adapter)
    attach(model, adapter)
    kept = plain_logits(model, tokens)
    assert torch.equal(kept, plain_logits(together, tokens))
    assert relative_error(kept, plain) > 1e-2
    for name, weight in together.named_parameters():
        base = model.get_parameter(_attached_name(model, name))
        delta = adapter.pairs[name].delta() if name in adapter.pairs else torch.zeros(())
        assert relative_error(weight, base + delta) < 1e-6


def _attached_name(model: Zaya, name: str) -> str:
    parent, _, attribute = name.rpartition(".")
    kept = f"{parent}.parametrizations.{attribute}.original"
    return kept if kept in dict(model.named_parameters()) else name


def test_magnitudes_scale_rows_to_their_length() -> None:
    """DoRA, equation 5, and kept as merged bit for bit."""
    model = small_model()
    tokens = tokens_for(model, 2, 9)
    adapter = with_magnitudes(random_adapter(model, ("attention", "router")), model)
    assert is_dora(adapter)
    for name, pair in adapter.pairs.items():
        assert torch.equal(pair.magnitude, model.get_parameter(name).detach().norm(dim=1))
        pair.magnitude = pair.magnitude * torch.linspace(0.5, 2, len(pair.magnitude))
    bases = {name: model.get_parameter(name).detach().clone() for name in adapter.pairs}
    together = copy.deepcopy(model)
    merge(together, adapter)
    for name, pair in adapter.pairs.items():
        weight = together.get_parameter(name)
        torch.testing.assert_close(weight.norm(dim=1), pair.magnitude)
        direction = torch.nn.functional.normalize(bases[name] + pair.delta(), dim=1)
        assert relative_error(weight, direction * pair.magnitude[:, None]) < 1e-6
    attach(model, adapter)
    assert torch.equal(plain_logits(model, tokens), plain_logits(together, tokens))
    detach(model)
    assert all(torch.equal(model.get_parameter(name), base) for name, base in bases.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("freeze", [False, True])
def test_detach_restores_the_very_base(dtype: torch.dtype, freeze: bool) -> None:
    model = small_model(compute_dtype=dtype)
    cast_for_inference(model, dtype)
    model.get_parameter("model.layers.1.mlp.experts.down_proj").requires_grad_(False)
    before = {name: (p, p.detach().clone(), p.requires_grad) for name, p in _parameters(model)}
    tokens = tokens_for(model, 1, 7)
    logits = plain_logits(model, tokens)
    adapter = random_adapter(model)
    attach(model, adapter, freeze)
    assert attached(model).keys() == adapter.pairs.keys()
    base = "model.layers.0.self_attn.o_proj.parametrizations.weight.original"
    assert model.get_parameter(base).requires_grad != freeze
    assert not torch.equal(plain_logits(model, tokens), logits)
    detach(model)
    after = dict(_parameters(model))
    assert list(after) == list(before)
    for name, (parameter, value, trained) in before.items():
        assert after[name] is parameter
        assert torch.equal(parameter, value)
        assert parameter.requires_grad == trained
    assert torch.equal(plain_logits(model, tokens), logits)
    assert not attached(model)
    detach(model)  # nothing to do


def _parameters(model: Zaya) -> list[tuple[str, torch.nn.Parameter]]:
    return list(model.named_parameters())


def test_gradients_equal_those_through_the_merged_weights() -> None:
    model = small_model()
    tokens = tokens_for(model, 2, 9)
    adapter = random_adapter(model)
    together = copy.deepcopy(model)
    merge(together, adapter)
    loss_of(together, tokens).backward()
    model.requires_grad_(False)
    attach(model, adapter)
    loss_of(model, tokens).backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * len(adapter.pairs)
    for name, pair in adapter.pairs.items():
        whole = together.get_parameter(name).grad
        assert whole is not None
        parent, _, attribute = name.rpartition(".")
        change = f"{parent}.parametrizations.{attribute}.0"
        for side, expected in (
            ("a", pair.scale * pair.b.mT @ whole),
            ("b", pair.scale * whole @ pair.a.mT),
        ):
            grad = trained[f"{change}.{side}"].grad
            assert grad is not None
            assert relative_error(grad, expected) < 2e-5, f"{name} {side}"


def test_gradients_equal_finite_differences() -> None:
    model = small_model()
    tokens = tokens_for(model, 1, 6)
    adapter = random_adapter(model, ("attention", "experts"))
    model.requires_grad_(False)
    attach(model, adapter)
    loss_of(model, tokens).backward()
    trained = [(p, p.grad.clone()) for p in model.parameters() if p.grad is not None]
    assert len(trained) == 2 * len(adapter.pairs)
    # Along the gradient the loss changes most, far above the rounding of fp32.
    length = math.sqrt(sum(float(grad.square().sum()) for _, grad in trained))
    losses = []
    with torch.no_grad():
        for move in (1e-3, -2e-3):
            for p, grad in trained:
                p.add_(grad, alpha=move / length)
            losses.append(float(loss_of(model, tokens)))
    assert (losses[0] - losses[1]) / 2e-3 == pytest.approx(length, rel=1e-2)


def test_training_changes_the_adapter_only() -> None:
    model = small_model()
    tokens = tokens_for(model, 2, 9)
    base = copy.deepcopy(model.state_dict())
    adapter = new_adapter(model.config, KINDS, rank=2, alpha=4.0)
    first = adapter.pairs["model.layers.0.self_attn.o_proj.weight"].a.clone()
    model.requires_grad_(False)
    before = loss_of(model, tokens).item()
    attach(model, adapter)
    assert loss_of(model, tokens).item() == before  # a fresh adapter changes nothing
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(5):
        optimizer.zero_grad()
        loss_of(model, tokens).backward()
        optimizer.step()
    kept = plain_logits(model, tokens)
    assert loss_of(model, tokens).item() < before
    trained = attached(model)
    detach(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, base[name])
    assert torch.equal(adapter.pairs["model.layers.0.self_attn.o_proj.weight"].a, first)
    adapter.pairs = trained
    merge(model, adapter)
    assert torch.equal(plain_logits(model, tokens), kept)


def test_a_low_precision_base_keeps_fp32_factors() -> None:
    model = small_model(compute_dtype=torch.bfloat16)
    cast_for_inference(model, torch.bfloat16)
    adapter = random_adapter(model)
    together = copy.deepcopy(model)
    merge(together, adapter)
    attach(model, adapter)
    tokens = tokens_for(model, 2, 9)
    assert torch.equal(plain_logits(model, tokens), plain_logits(together, tokens))
    loss_of(model, tokens).backward()
    for name, parameter in model.named_parameters():
        if name.endswith((".0.a", ".0.b")):
            assert parameter.dtype == torch.float32
            assert parameter.grad is not None
            assert bool(torch.isfinite(parameter.grad).all())
            assert bool(parameter.grad.any())
    name = "model.layers.0.mlp.experts.down_proj"
    weight = together.get_parameter(name)
    wide = model.get_parameter(_attached_name(model, name)).float()
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight, (wide + adapter.pairs[name].delta()).bfloat16())


def test_merged_is_per_tensor_and_leaves_its_input() -> None:
    model = small_model()
    adapter = random_adapter(model, ("experts",))
    together = copy.deepcopy(model)
    merge(together, adapter)
    for name, tensor in model.state_dict().items():
        value = tensor.clone()
        result = merged(name, tensor, adapter)
        assert torch.equal(tensor, value)
        assert torch.equal(result, together.state_dict()[name])
        assert (result is tensor) == (name not in adapter.pairs)
    name = next(iter(adapter.pairs))
    with pytest.raises(UserError, match=name):
        merged(name, torch.zeros(2, 2), adapter)


def test_fresh_adapters() -> None:
    config = small_config()
    adapter = new_adapter(config, ["attention"], rank=2, alpha=3.0, seed=5, use_rslora=True)
    assert len(adapter.pairs) == 5 * config.num_hidden_layers
    assert {kind_of(name) for name in adapter.pairs} == {"attention"}
    for pair in adapter.pairs.values():
        bound = 1 / math.sqrt(pair.shape[-1])
        assert not pair.b.any()
        assert float(pair.a.abs().max()) <= bound
        assert float(pair.a.abs().max()) > 0.8 * bound
        assert pair.scale == 3 / math.sqrt(2)
    again = new_adapter(config, ["attention"], rank=2, alpha=3.0, seed=5)
    other = new_adapter(config, ["attention"], rank=2, alpha=3.0, seed=6)
    name = "model.layers.2.self_attn.qkv_proj.v_proj_delayed.weight"
    assert torch.equal(again.pairs[name].a, adapter.pairs[name].a)
    assert not torch.equal(other.pairs[name].a, adapter.pairs[name].a)


def test_targets_by_ending_or_name() -> None:
    config = small_config()
    chosen = new_adapter(
        config, ["o_proj.weight", "model.layers.1.mlp.experts.down_proj"], rank=1, alpha=1
    ).pairs
    assert len(chosen) == 4
    assert chosen["model.layers.1.mlp.experts.down_proj"].a.shape == (4, 1, 24)
    routers = new_adapter(config, ["router"], rank=1, alpha=1).pairs
    assert len(routers) == 4 * config.num_hidden_layers


def test_the_classic_alternatives_can_be_adapted() -> None:
    model = small_model(attention="standard", router="linear", residual="plain")
    adapter = random_adapter(model)
    assert len(adapter.pairs) == 3 * (4 + 2 + 1)
    together = copy.deepcopy(model)
    merge(together, adapter)
    attach(model, adapter)
    tokens = tokens_for(model, 1, 6)
    assert torch.equal(plain_logits(model, tokens), plain_logits(together, tokens))


@pytest.mark.parametrize(
    "target",
    [
        "model.embed_tokens.weight",
        "conv_qk_grouped.weight",
        "input_layernorm.weight",
        "fc1.bias",
        "temp",
        "router_states_scale",
        "v_proj",
    ],
)
def test_refused_targets_are_named(target: str) -> None:
    with pytest.raises(UserError, match=target):
        new_adapter(small_config(), [target], rank=2, alpha=2)


@pytest.mark.parametrize(("targets", "rank"), [([], 2), (["attention"], 0)])
def test_empty_adapters_are_refused(targets: list[str], rank: int) -> None:
    with pytest.raises(UserError):
        new_adapter(small_config(), targets, rank, alpha=2)


@pytest.mark.parametrize(
    ("name", "a", "b"),
    [
        ("model.layers.7.self_attn.o_proj.weight", (2, 64), (32, 2)),
        ("model.embed_tokens.weight", (2, 32), (61, 2)),
        ("model.layers.0.self_attn.o_proj.weight", (2, 63), (32, 2)),
        ("model.layers.0.self_attn.o_proj.weight", (2, 64), (32, 3)),
        ("model.layers.0.mlp.experts.down_proj", (3, 2, 24), (4, 32, 2)),
        ("model.layers.0.mlp.experts.down_proj", (2, 24), (32, 2)),
    ],
)
def test_what_does_not_fit_changes_nothing(
    name: str, a: tuple[int, ...], b: tuple[int, ...]
) -> None:
    model = small_model()
    before = copy.deepcopy(model.state_dict())
    adapter = random_adapter(model, ("attention",))
    adapter.pairs[name] = Pair(torch.ones(a), torch.ones(b), 1.0)
    for use in (attach, merge):
        with pytest.raises(UserError, match=name):
            use(model, adapter)
        assert not attached(model)
        for key, value in model.state_dict().items():
            assert torch.equal(value, before[key])


def test_a_second_adapter_is_refused() -> None:
    model = small_model()
    adapter = random_adapter(model)
    attach(model, adapter)
    for use in (attach, merge):
        with pytest.raises(UserError, match="detach"):
            use(model, adapter)
    detach(model)
    attach(model, adapter)
