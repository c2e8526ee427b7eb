"""What an adapter that is trained must show: gradients everywhere, and a base that stands still."""

from __future__ import annotations

import pytest
import torch

from openzaya.config.recipe import AdapterConfig, OptimizerConfig
from openzaya.errors import UserError
from openzaya.model.lora import kept, kind_of
from openzaya.optim.groups import build_adapter_optimizer
from openzaya.train.adapter import (
    begin_adapter,
    load_kept,
    prove_gradients,
    save_kept,
    weights_digest,
)
from tests.model.helpers import small_model, tokens_for

ALL = AdapterConfig(targets=("attention", "experts", "router"), rank=2, alpha=4.0)


@pytest.fixture
def trained():
    """A model with a fresh adapter, and a function that runs a step."""
    model = small_model()
    adapter = begin_adapter(model, ALL, seed=0, base="somewhere")
    [optimizer] = build_adapter_optimizer(model, OptimizerConfig()).values()
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    tokens = tokens_for(model, 4, 12)

    def backward():
        optimizer.zero_grad()
        out = model(tokens)
        model.loss(out.hidden, tokens.roll(-1, 1)).backward()
        return out.load

    return model, adapter, optimizer, backward


def test_every_expert_that_got_tokens_has_a_gradient(trained):
    """B at the first step, A from the second on; attention and router everywhere."""
    model, _, optimizer, backward = trained
    for side in ("b", "a"):
        load = backward()
        smallest = prove_gradients(model, load, side)
        assert set(smallest) == {"attention", "experts", "router"}
        for name, _, _, change in kept(model):
            gradient = {"a": change.a, "b": change.b}[side].grad
            assert gradient is not None, name
            if side == "b":
                assert not change.a.grad.any(), "B is zero"
            if kind_of(name) != "experts":
                assert gradient.norm() > 0, name
                continue
            counts = load[int(name.split(".")[2]), : len(gradient)]
            moved = change.b.detach().flatten(1).any(1) if side == "a" else counts > 0
            assert torch.equal(gradient.flatten(1).any(1), (counts > 0) & moved), name
        optimizer.step()


def test_what_gets_no_gradient_is_named(trained):
    model, _, _, backward = trained
    load = backward()
    name, _, _, change = next(k for k in kept(model) if kind_of(k[0]) == "experts")
    change.b.grad.zero_()
    with pytest.raises(UserError, match=rf"{name} gets no gradient \(factor B\)"):
        prove_gradients(model, load, "b")
    load[int(name.split(".")[2])] = 0
    prove_gradients(model, load, "b")  # no token went there: nothing can be said
    change = kept(model)[0][3]
    change.b.grad = None
    with pytest.raises(UserError, match="gets no gradient"):
        prove_gradients(model, load, "b")


def test_only_factors_are_trained_and_the_base_stays(trained, tmp_path):
    model, adapter, optimizer, backward = trained
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert all(".parametrizations." in name and name[-2:] in (".a", ".b") for name in names)
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if n not in names}
    for _ in range(2):
        backward()
        optimizer.step()
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in frozen.items())
    assert all(after[name].grad is None for name in frozen)
    save_kept(model, adapter, tmp_path)
    other = small_model()
    begin_adapter(other, ALL, seed=1, base=None)
    load_kept(other, tmp_path)
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, after[name]), name
    fewer = small_model()
    begin_adapter(fewer, ALL.model_copy(update={"targets": ("router",)}), seed=0, base=None)
    with pytest.raises(UserError, match="an adapter of other matrices"):
        load_kept(fewer, tmp_path)


def test_a_digest_of_weights_sees_every_bit():
    model = small_model()
    digest = weights_digest(model)
    assert digest == weights_digest(small_model())
    with torch.no_grad():
        weight = model.model.layers[1].mlp.experts.down_proj
        weight.view(torch.int32).view(-1)[5] ^= 1
    assert weights_digest(model) != digest
