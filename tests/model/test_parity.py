"""Forward and backward against `transformers`' ZayaForCausalLM, over random geometries."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import ZayaForCausalLM

from tests.model.helpers import TOLERANCE
from tests.oracle import pair, random_geometry, random_tokens, randomise, relative_error

SEEDS = range(66, 90)  # the first run of 24 that covers what a test below claims
BATCH, SEQ = 2, 21


def _contributions(oracle: ZayaForCausalLM) -> dict[str, torch.Tensor]:
    """Hook every temperature; after the backward, its gradient's summands in absolute value."""
    kept: dict[str, torch.Tensor] = {}
    for name, module in oracle.named_modules():
        if name.endswith("qk_norm"):

            def keep(_, __, output, name=name):
                output[1].retain_grad()
                kept[f"{name}.temp"] = output[1]

            module.register_forward_hook(keep)
    return kept


@pytest.mark.parametrize("seed", SEEDS)
def test_logits_loss_and_gradients(seed):
    """Oracle: transformers with the same weights, its eager and its SDPA attention by turns.

    A gradient's error is measured by the largest entry of that parameter's gradient. The gradient
    of a temperature is a sum over tokens and channels whose parts nearly cancel, in the oracle as
    in ours, so its error is measured by the sum of the parts' magnitudes instead.
    """
    config = random_geometry(seed)
    oracle, ours = pair(config, seed)
    oracle.set_attn_implementation("eager" if seed % 2 == 0 else "sdpa")
    kept = _contributions(oracle)
    tokens = random_tokens(config, BATCH, SEQ, seed)
    targets = torch.cat([tokens[:, 1:], tokens.new_full((BATCH, 1), -100)], dim=1)

    expected = oracle(tokens, use_cache=False).logits
    expected_loss = F.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum")
    expected_loss.backward()
    output = ours(tokens)
    loss = ours.loss(output.hidden, targets)
    loss.backward()

    assert relative_error(ours.logits(output.hidden), expected) < TOLERANCE
    assert float(loss.detach()) == pytest.approx(float(expected_loss.detach()), rel=TOLERANCE)
    reference = dict(oracle.named_parameters())
    assert reference.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        expected_grad = reference[name].grad
        assert expected_grad is not None, name
        assert parameter.grad is not None, name
        scale = expected_grad.abs().max()
        if name.endswith("temp"):
            key = kept[name]
            parts = (key.grad * key).abs().sum((0, 1, 3)) / reference[name].abs()
            scale = parts.detach()
        # Where all tokens of a layer skip, what leads to its experts only has a gradient of zero.
        optional = ".mlp." in name or "post_attention_layernorm" in name
        assert bool((scale > 0).all()) or optional, f"{name} has no gradient to compare"
        error = (parameter.grad - expected_grad).abs()
        assert bool((error <= TOLERANCE * scale).all()), f"{name}: {float(error.max()):.1e}"


def test_the_seeds_cover_what_they_claim():
    """Oracle: the claim itself. Geometries are random, so what they cover is counted here."""
    configs = [random_geometry(seed) for seed in SEEDS]
    assert {config.cca_time0 for config in configs} == {2, 3, 4}
    assert {config.cca_time1 for config in configs} == {2, 3, 4}
    assert {config.num_key_value_heads for config in configs} == {1, 2, 3, 4}
    assert {c.num_attention_heads // c.num_key_value_heads for c in configs} == {1, 2, 3, 4}
    assert max(config.num_experts for config in configs) == 24
    assert min(config.num_experts for config in configs) == 2
    assert {config.tie_word_embeddings for config in configs} == {True, False}
    assert {kind for c in configs for kind in c.layer_types} == {"hybrid", "hybrid_sliding"}
    assert max(config.sliding_window for config in configs) < SEQ, "a window is never exceeded"
    assert {config.num_hidden_layers for config in configs} == {1, 2, 3, 4, 5, 6}

    skipping, eda = 0, 0
    for seed, config in zip(SEEDS, configs, strict=True):
        _, ours = pair(config, seed)
        with torch.no_grad():
            load = ours(random_tokens(config, BATCH, SEQ, seed)).load
        assert load.shape == (config.num_hidden_layers, config.num_experts + 1)
        assert (load.sum(1) == BATCH * SEQ).all()
        skipping += bool(load[:, -1].any()) and bool(load[:, :-1].any())
        eda += any(name.endswith("router_states_scale") for name, _ in ours.named_parameters())
    assert skipping >= len(SEEDS) // 3
    assert eda == sum(config.num_hidden_layers > 1 for config in configs) > len(SEEDS) // 2


def test_randomise_moves_every_parameter_and_buffer():
    """Oracle: the oracle's own initial values. A default left in place would hide its term."""
    config = random_geometry(3)
    oracle = ZayaForCausalLM(config)
    before = {name: tensor.clone() for name, tensor in oracle.state_dict().items()}
    randomise(oracle, 3)
    for name, tensor in oracle.state_dict().items():
        assert bool((tensor != before[name]).all()), f"{name} keeps default values"
        assert bool(tensor.isfinite().all()), name


def test_parameter_names_and_shapes_are_native():
    """Oracle: transformers' state dict; the layout in memory is the one on disk."""
    for seed in (0, 5, 11):
        config = random_geometry(seed)
        oracle, ours = pair(config, seed)
        native = {name: tensor.shape for name, tensor in oracle.state_dict().items()}
        if config.tie_word_embeddings:
            del native["lm_head.weight"]
        assert {name: tensor.shape for name, tensor in ours.state_dict().items()} == native
