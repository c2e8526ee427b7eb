"""Noise of training: of the right size, drawn from its place, and gone elsewhere."""

from __future__ import annotations

import math

import pytest
import torch

from openzaya.config.load import load_recipe
from openzaya.model.lora import attach, kept, new_adapter
from openzaya.train.adapter import dropped_inputs
from openzaya.train.noise import neftune_noise, noisy_tokens, training_noise
from tests.model.helpers import small_model, tokens_for


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def recipe_with(alpha):
    fields = [f"neftune_alpha={alpha}", "sources.plays.path=x.txt", "sources.plays.kind=text"]
    return load_recipe("tiny", fields)


@torch.no_grad()
def hidden_of(model, tokens):
    return model(tokens).hidden


def test_noise_is_uniform_and_scaled_by_each_document():
    positions = torch.cat([torch.arange(100), torch.arange(400)])
    noise = neftune_noise(positions, 64, 5.0, generator())
    for part, length in ((noise[:100], 100), (noise[100:], 400)):
        bound = 5.0 / math.sqrt(length * 64)
        assert part.abs().max() <= bound
        assert part.abs().max() > 0.99 * bound
        assert float(part.std()) == pytest.approx(bound / math.sqrt(3), rel=0.02)
        assert abs(float(part.mean())) < 0.05 * bound
    alone = neftune_noise(positions[:100], 64, 5.0, generator())
    assert torch.equal(alone, noise[:100])


def test_noise_of_a_row_depends_on_its_place_alone():
    """Not on how the batch is cut into micro-batches, nor on what was drawn before."""
    model = small_model()
    tokens = tokens_for(model, 4, 9)
    positions = torch.arange(9).expand(4, 9)
    recipe = recipe_with(5.0)
    with training_noise(model, recipe, 3, 0, positions):
        whole = hidden_of(model, tokens)
    parts = []
    for row in (2, 0, 1, 3):
        with training_noise(model, recipe, 3, row, positions[:1]):
            parts.append((row, hidden_of(model, tokens[row : row + 1])))
    for row, part in parts:
        torch.testing.assert_close(part[0], whole[row], rtol=1e-4, atol=1e-5)
    with training_noise(model, recipe, 4, 0, positions):
        assert not torch.allclose(hidden_of(model, tokens), whole, atol=1e-3)


def test_noise_is_on_the_embedding_and_nowhere_else():
    model = small_model()
    tokens = tokens_for(model, 1, 9)
    positions = torch.arange(9)[None]
    plain, names = hidden_of(model, tokens), list(model.state_dict())
    recipe = recipe_with(5.0)
    with training_noise(model, recipe, 0, 0, positions):
        embedded = model.model.embed_tokens(tokens)
        assert list(model.state_dict()) == names
    with pytest.raises(KeyError), training_noise(model, recipe, 0, 0, positions):
        raise KeyError
    assert torch.equal(hidden_of(model, tokens), plain)
    noise = embedded - model.model.embed_tokens(tokens)
    bound = 5.0 / math.sqrt(9 * model.config.hidden_size)
    assert 0.9 * bound < float(noise.detach().abs().max()) <= bound * 1.001
    with training_noise(model, recipe_with(0.0), 0, 0, positions):
        assert torch.equal(hidden_of(model, tokens), plain)


def test_dropout_leaves_channels_out_and_keeps_the_expectation():
    model = small_model()
    adapter = new_adapter(model.config, ["attention", "experts"], 2, 2.0)
    for pair in adapter.pairs.values():
        pair.b = torch.randn(pair.b.shape, generator=generator(1))
    attach(model, adapter)
    name, module, attribute, change = kept(model)[0]
    base = getattr(module.parametrizations, attribute).original
    full = getattr(module, attribute) - base
    total = torch.zeros_like(full)
    drawn = generator()
    for _ in range(400):
        with dropped_inputs(model, 0.25, drawn):
            delta = getattr(module, attribute) - base
        gone = (delta.abs().amax(0) < 1e-7).float()
        torch.testing.assert_close(delta, full * (1 - gone) / 0.75, rtol=1e-3, atol=1e-5)
        total += delta
    assert relative(total / 400, full) < 0.1, name
    assert change.keep is None
    assert torch.equal(getattr(module, attribute) - base, full)
    with dropped_inputs(model, 0.5, generator()):
        stacks = [c.keep for n, _, _, c in kept(model) if "experts" in n]
        assert all(len({tuple(row.flatten().tolist()) for row in keep}) > 1 for keep in stacks)


def relative(a, b):
    return float((a - b).norm() / b.norm())


def test_noisy_tokens_are_of_the_row_itself_and_drawn_from_their_place():
    recipe = load_recipe("tiny", ["token_noise=0.25"])
    tokens = torch.stack([torch.arange(2000), 5000 + torch.arange(2000)])
    noisy = noisy_tokens(tokens, recipe, 3, 0)
    share = (noisy != tokens).float().mean()
    assert float(share) == pytest.approx(0.25, abs=0.02)
    assert (noisy // 5000 == tokens // 5000).all()
    assert torch.equal(noisy_tokens(tokens[1:], recipe, 3, 1)[0], noisy[1])
    assert not torch.equal(noisy_tokens(tokens, recipe, 4, 0), noisy)
    assert noisy_tokens(tokens, load_recipe("tiny"), 3, 0) is tokens
