"""How the next token is drawn.

In this order, as `transformers` has it: logits / temperature; keep the `top_k` most probable
tokens; of those (probabilities renormalised) keep the fewest that together reach `top_p`; keep
what has at least `min_p` times the probability of the most probable one; draw. Temperature 0 takes
the most probable token.

The draw inverts the cumulative distribution at one uniform number from the row's own generator.
A row thus uses its logits, its settings and its generator, and nothing else: the same request gives
the same tokens alone and in any batch.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from openzaya.errors import UserError

_LARGEST_SEED = 2**63 - 1
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class SamplingSettings:
    """What a request asks for.

    Attributes:
        temperature: 0 is greedy, 1 is the model's own distribution.
        top_p: in (0, 1]; 1 keeps all.
        top_k: 0 or -1 keep all.
        min_p: in [0, 1]; 0 keeps all.
        seed: None draws a new one for each request.
        max_new_tokens: None takes a default, cut to what fits the model's context.
        stop: strings that end the text; they are not part of it.

    Raises:
        UserError: if a value is out of range; it names the value and the range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        def require(good: bool, name: str, rule: str) -> None:
            if not good:
                raise UserError(f"{name} is {getattr(self, name)!r}; it must be {rule}")

        # Comparisons written so that NaN fails them.
        warm = math.isfinite(self.temperature) and self.temperature >= 0
        require(warm, "temperature", "a number from 0 (greedy) upwards")
        require(0 < self.top_p <= 1, "top_p", "above 0 and at most 1 (1 keeps all tokens)")
        require(self.top_k >= -1, "top_k", "at least 1, or 0 or -1 to keep all tokens")
        require(0 <= self.min_p <= 1, "min_p", "from 0 (keeps all tokens) to 1")
        seed_fits = self.seed is None or 0 <= self.seed <= _LARGEST_SEED
        require(seed_fits, "seed", f"from 0 to {_LARGEST_SEED}")
        long_enough = self.max_new_tokens is None or self.max_new_tokens >= 1
        require(long_enough, "max_new_tokens", "at least 1")
        strings = not isinstance(self.stop, str) and all(
            isinstance(text, str) and text for text in self.stop
        )
        require(strings, "stop", "a list of strings, none of them empty")
        object.__setattr__(self, "stop", tuple(self.stop))

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0

    def for_row(self, row: int) -> SamplingSettings:
        """Of row `row` of a batch under one setting: row 0 has the seed, each next one a seed more.

        Equal prompts of a batch thus get different samples, and `seed + row` repeats any of them.
        """
        if self.seed is None or row == 0:
            return self
        return replace(self, seed=(self.seed + row) & _LARGEST_SEED)


def generator_for(settings: SamplingSettings) -> torch.Generator:
    """The row's source of random numbers; on the CPU, so that any device draws the same."""
    seed = secrets.randbits(63) if settings.seed is None else settings.seed
    return torch.Generator().manual_seed(seed)


def sample(
    logits: Tensor, settings: Sequence[SamplingSettings], generators: Sequence[torch.Generator]
) -> list[int]:
    """Draw one token a row.

    Args:
        logits: [batch, vocab] fp32.
        settings, generators: one a row. A greedy row draws no random number.

    Returns:
        [batch] ids.
    """
    ids = logits.argmax(-1).tolist()
    for ordered in (False, True):
        rows = [
            row
            for row, own in enumerate(settings)
            if not own.greedy and (own.top_k > 0 or own.top_p < 1) == ordered
        ]
        if rows:
            drawn = _draw(
                logits if len(rows) == len(ids) else logits[rows],
                [settings[row] for row in rows],
                [generators[row] for row in rows],
                ordered,
            )
            for row, token in zip(rows, drawn, strict=True):
                ids[row] = token
    return [int(token) for token in ids]


def _draw(
    logits: Tensor,
    settings: Sequence[SamplingSettings],
    generators: Sequence[torch.Generator],
    ordered: bool,
) -> list[int]:
    """Rows that are not greedy; sorted only where top_k or top_p need the order."""

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    # The maximum goes first, so that no temperature, however small, gives inf - inf or 0 / 0.
    temperature = column([own.temperature for own in settings]).float().clamp_min(_TINY)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    order = None
    if ordered:
        logits, order = logits.sort(dim=-1, descending=True, stable=True)
        vocabulary = logits.shape[-1]
        limits = [own.top_k if own.top_k > 0 else vocabulary for own in settings]
        rank = torch.arange(vocabulary, device=logits.device)
        logits = logits.masked_fill(rank >= column(limits), float("-inf"))
    weights = logits.softmax(-1, dtype=torch.float64)
    if ordered:
        # A token stays if those before it do not reach top_p; the first one always does.
        before = weights.cumsum(-1) - weights
        top_p = column([own.top_p for own in settings])
        weights = weights.masked_fill((before >= top_p) & (top_p < 1), 0.0)
    floor = column([own.min_p for own in settings]) * weights.amax(-1, keepdim=True)
    weights = weights.masked_fill(weights < floor, 0.0)
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    uniform = torch.cat([torch.rand(1, generator=g, dtype=torch.float64) for g in generators])
    point = uniform.to(logits.device)[:, None] * total
    # Rounding may carry the point to the total, where no token is left.
    point = point.minimum(torch.nextafter(total, torch.zeros_like(total)))
    place = torch.searchsorted(cumulative, point, right=True)
    if order is not None:
        place = order.gather(1, place)
    drawn: list[int] = place.squeeze(1).tolist()
    return drawn
