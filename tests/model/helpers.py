"""Small models with every parameter away from its default, and ways to run them."""

from __future__ import annotations

import random
from typing import Any

import torch

from openzaya.model.config import ModelConfig
from openzaya.model.model import Zaya
from openzaya.model.state import SequenceState
from tests.oracle import randomise

TOLERANCE = 2e-5
"""Largest fp32 difference, relative to the largest magnitude that is compared."""


def small_config(**changes: Any) -> ModelConfig:
    """Three layers, both attention types, a window shorter than the sequences of the tests."""
    fields: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "layer_types": ("hybrid_sliding", "hybrid", "hybrid_sliding"),
        "sliding_window": 4,
        "rope_theta": 100.0,
        "sliding_rope_theta": 30.0,
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "router_hidden_size": 16,
        "eos_token_id": 1,
    }
    return ModelConfig(**{**fields, **changes})


def small_model(seed: int = 0, compute_dtype: torch.dtype = torch.float32, **changes: Any) -> Zaya:
    """A randomised model; the skip class wins its share of the tokens."""
    model = Zaya(small_config(**changes), compute_dtype)
    randomise(model, seed)
    return model.eval()


def tokens_for(model: Zaya, batch: int, seq: int, seed: int = 0) -> torch.Tensor:
    """Random token ids [batch, seq]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, (batch, seq), generator=generator)


@torch.no_grad()
def plain_logits(model: Zaya, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [batch, seq, vocab] of one uncached forward without padding."""
    return model.logits(model(tokens).hidden)


@torch.no_grad()
def chunked_logits(
    model: Zaya, tokens: torch.Tensor, sizes: list[int], state: SequenceState | None = None
) -> torch.Tensor:
    """The same, from cached forwards over chunks of the given sizes."""
    assert sum(sizes) == tokens.shape[1]
    state = model.new_state(tokens.shape[0], 1) if state is None else state
    hidden = [model(chunk, state=state).hidden for chunk in tokens.split(sizes, dim=1)]
    return model.logits(torch.cat(hidden, dim=1))


def pad_rows(
    rows: list[torch.Tensor], width: int, style: str, seed: int, vocab: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lay rows out in [batch, width], with random ids where there is no token.

    Args:
        style: "left", "right", or "holes" for padding scattered anywhere.

    Returns:
        Tokens and the padding mask, True on real tokens.
    """
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, (len(rows), width), generator=generator)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        if style == "left":
            columns = list(range(width - len(row), width))
        elif style == "right":
            columns = list(range(len(row)))
        else:
            columns = sorted(rng.sample(range(width), len(row)))
        mask[i, columns] = True
        tokens[i, columns] = row
    return tokens, mask


def check_gradients(model: Zaya, expected: dict[str, torch.Tensor | None]) -> None:
    """Assert that all gradients agree with the expected ones.

    The error may be a small share of that parameter's largest gradient. The gradient of a
    temperature cancels in its sum, and a window of one token leaves queries and keys with none
    but rounding, so an error of rounding's size beside the model's largest gradient is no error.
    """
    largest = max(float(g.abs().max()) for g in expected.values() if g is not None)
    for name, parameter in model.named_parameters():
        wanted = expected[name]
        assert wanted is not None, name
        assert parameter.grad is not None, name
        error = float((parameter.grad - wanted).abs().max())
        bound = 5e-5 * float(wanted.abs().max()) + 1e-6 * largest
        assert error <= bound, f"{name}: {error:.1e}, at most {bound:.1e}"
