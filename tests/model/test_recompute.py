"""Activation checkpointing changes memory and time, and not one bit of a result."""

from __future__ import annotations

import pytest
import torch

from openzaya.model.block import Block
from tests.model.helpers import small_model, tokens_for

MODES = ["attention", "experts", "full"]


def run(model, tokens, positions=None, mask=None):
    """Loss, load and all gradients of one step."""
    model.zero_grad()
    out = model(tokens, positions=positions, padding_mask=mask)
    loss = model.loss(out.hidden, tokens.roll(-1, 1))
    loss.backward()
    return loss.detach(), out.load, {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "changes",
    [{}, {"skip_expert": "identity"}, {"attention": "standard", "router": "linear"}],
    ids=["zaya", "identity", "standard"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_bit_identical(mode, changes, dtype):
    """Oracle: the same step with everything kept. Packed rows, one of them padded."""
    sizes = {"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 32}
    model = small_model(compute_dtype=dtype, **sizes, **changes)
    tokens = tokens_for(model, 2, 40)
    positions = torch.cat([torch.arange(17), torch.arange(23)]).repeat(2, 1)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[1, 33:] = False
    expected = run(model, tokens, positions, mask)
    model.recompute = mode
    found = run(model, tokens, positions, mask)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1]), "load counted otherwise"
    for name, gradient in expected[2].items():
        assert torch.equal(found[2][name], gradient), name


@pytest.mark.parametrize("mode", ["experts", "full"])
def test_the_second_run_repeats_the_routing_of_the_first(mode):
    """Field note 45: biases that change between forward and backward would send tokens elsewhere.

    The oracle is the same step without the change.
    """
    model = small_model()
    model.recompute = mode
    tokens = tokens_for(model, 2, 24)
    _, _, expected = run(model, tokens)
    expected = {name: gradient.clone() for name, gradient in expected.items()}
    model.zero_grad()
    loss = model.loss(model(tokens).hidden, tokens.roll(-1, 1))
    for block in model.model.layers:
        block.mlp.gate.balancing_biases += torch.rand(5, generator=torch.Generator().manual_seed(1))
    assert not torch.equal(model.loss(model(tokens).hidden, tokens.roll(-1, 1)), loss)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name


@pytest.mark.parametrize("mode", MODES)
def test_each_layer_runs_twice_and_no_more(mode, monkeypatch):
    """Field note 45: recomputing must not grow with the depth of the router's averaging."""
    model = small_model()
    model.recompute = mode
    kinds = {"attention": "self_attn", "experts": "mlp"}
    runs = []
    for block in model.model.layers:
        watched = block if mode == "full" else getattr(block, kinds[mode])
        watched.register_forward_pre_hook(lambda module, _: runs.append(module))
    run(model, tokens_for(model, 2, 24))
    assert len(runs) == 2 * len(model.model.layers)
    assert all(runs.count(module) == 2 for module in set(runs))


def test_nothing_is_recomputed_without_gradients(monkeypatch):
    model = small_model()
    model.recompute = "full"
    runs = []
    original = Block.forward
    monkeypatch.setattr(
        Block, "forward", lambda self, *a, **k: (runs.append(self), original(self, *a, **k))[1]
    )
    with torch.no_grad():
        model(tokens_for(model, 2, 24))
    assert len(runs) == len(model.model.layers)


def test_kept_memory(monkeypatch):
    """Oracle: the bytes that autograd saves of one forward, counted through its hooks."""

    def saved(mode):
        model = small_model(num_hidden_layers=8, layer_types=None, sliding_window=None)
        model.recompute = mode
        storages = {}
        parameters = {p.data_ptr() for p in model.parameters()}

        def pack(tensor):
            if tensor.data_ptr() not in parameters:
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = model(tokens_for(model, 4, 32))
        total = sum(storages.values())
        del out
        return total

    everything = saved("none")
    assert saved("full") < everything / 5
    assert saved("attention") < 0.8 * everything
    assert saved("experts") < 0.8 * everything
