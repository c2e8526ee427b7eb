"""Noise that only training has: in tokens, on embeddings (NEFTune, arXiv 2310.05914), in adapters.

It is drawn from (seed, step, row), so a resumed run draws the same. The model knows nothing of it:
noise on embeddings is added by a hook on the embedding that exists while a micro-batch runs, so
that evaluation, generation and what is saved are those of the plain model, and the forward needs no
branch or argument for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from openzaya.config.recipe import Recipe
from openzaya.data.rng import hash64
from openzaya.model.model import Zaya
from openzaya.train.adapter import dropped_inputs


@contextmanager
def training_noise(
    model: Zaya, recipe: Recipe, step: int, first_row: int, positions: Tensor
) -> Iterator[None]:
    """Whatever noise the recipe wants, around the forward and backward of one micro-batch.

    Args:
        step: of the run.
        first_row: of the micro-batch within the global batch.
        positions: [batch, seq] as the model gets them.
    """
    dropout = 0.0 if recipe.adapter is None else recipe.adapter.dropout
    with dropped_inputs(model, dropout, _generator("dropout", recipe.seed, step, first_row)):
        if not recipe.neftune_alpha:
            yield
            return
        width = model.config.hidden_size
        noise = torch.stack(
            [
                neftune_noise(
                    row, width, recipe.neftune_alpha, _generator("neftune", recipe.seed, step, at)
                )
                for at, row in enumerate(positions.cpu(), first_row)
            ]
        )

        def add(module: nn.Module, inputs: tuple[Tensor, ...], embedded: Tensor) -> Tensor:
            return embedded + noise.to(embedded)

        hook = model.model.embed_tokens.register_forward_hook(add)
        try:
            yield
        finally:
            hook.remove()


def noisy_tokens(tokens: Tensor, recipe: Recipe, step: int, first_row: int) -> Tensor:
    """Input tokens of a micro-batch, some replaced by others of their own row.

    So no token comes in that the text does not have, and each about as often as in the text.

    Args:
        tokens: [batch, seq].
        step: of the run.
        first_row: of the micro-batch within the global batch.
    """
    if not recipe.token_noise:
        return tokens
    rows = []
    for at, row in enumerate(tokens, first_row):
        generator = _generator("tokens", recipe.seed, step, at)
        hit = torch.rand(len(row), generator=generator) < recipe.token_noise
        others = row[torch.randint(len(row), (len(row),), generator=generator)]
        rows.append(torch.where(hit, others, row))
    return torch.stack(rows)


def neftune_noise(
    positions: Tensor, width: int, alpha: float, generator: torch.Generator
) -> Tensor:
    """Uniform noise within alpha / sqrt(L d), L being the length of each packed document.

    Args:
        positions: [seq], 0 where a document starts.

    Returns:
        [seq, width] fp32.
    """
    document = (positions == 0).cumsum(0)
    length = torch.bincount(document)[document]
    uniform = 2 * torch.rand(len(positions), width, generator=generator) - 1
    return uniform * (alpha / (length * width).sqrt())[:, None]


def _generator(*keys: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(hash64(*keys) >> 1)  # seeds are signed
