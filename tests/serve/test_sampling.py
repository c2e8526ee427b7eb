from __future__ import annotations

from typing import Any

import pytest
import torch

from openzaya.errors import UserError
from openzaya.serve.sampling import SamplingSettings, generator_for, sample

PROBABILITIES = [0.4, 0.1, 0.3, 0.15, 0.05]
DRAWS = 4000


def frequencies(**fields: Any) -> list[float]:
    """Shares of the five tokens over many rows that differ in their seeds alone."""
    logits = torch.tensor(PROBABILITIES).log().repeat(DRAWS, 1)
    settings = [SamplingSettings(seed=seed, **fields) for seed in range(DRAWS)]
    ids = sample(logits, settings, [generator_for(own) for own in settings])
    return (torch.bincount(torch.tensor(ids), minlength=5) / DRAWS).tolist()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, PROBABILITIES),
        ({"temperature": 0.0}, [1, 0, 0, 0, 0]),
        ({"temperature": 1e-300}, [1, 0, 0, 0, 0]),
        # p^2, renormalised
        (
            {"temperature": 0.5},
            [0.16 / 0.285, 0.01 / 0.285, 0.09 / 0.285, 0.0225 / 0.285, 0.0025 / 0.285],
        ),
        ({"top_k": 2}, [4 / 7, 0, 3 / 7, 0, 0]),
        ({"top_k": -1}, PROBABILITIES),
        ({"top_k": 99}, PROBABILITIES),
        # 0.4 + 0.3 fall short of 0.75, the next token crosses it
        ({"top_p": 0.75}, [0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0, 0]),
        # at least 0.3 x 0.4
        ({"min_p": 0.3}, [0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85, 0]),
        ({"min_p": 1.0}, [1, 0, 0, 0, 0]),
        # top-p sees the distribution that top-k left: 0.4/0.85 + 0.3/0.85 reach 0.8, not 0.85
        ({"top_k": 3, "top_p": 0.8}, [4 / 7, 0, 3 / 7, 0, 0]),
        ({"top_k": 3, "min_p": 0.5}, [4 / 7, 0, 3 / 7, 0, 0]),
    ],
)
def test_distributions(fields: dict[str, Any], expected: list[float]) -> None:
    shares = frequencies(**fields)
    assert shares == pytest.approx(expected, abs=0.03)
    assert [share == 0 for share in shares] == [share == 0 for share in expected]


def test_a_row_does_not_depend_on_its_mates() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(24, 301, generator=generator)
    logits[5] = logits[6]
    choices: list[dict[str, Any]] = [
        {},
        {"top_k": 7},
        {"top_p": 0.6},
        {"min_p": 0.1},
        {"temperature": 0.0},
        {"temperature": 0.3, "top_p": 0.9, "top_k": 50, "min_p": 0.02},
    ]
    settings = [SamplingSettings(seed=row, **choices[row % 6]) for row in range(24)]
    together = sample(logits, settings, [generator_for(own) for own in settings])
    order = list(reversed(range(24)))
    shuffled = sample(
        logits[order],
        [settings[row] for row in order],
        [generator_for(settings[row]) for row in order],
    )
    assert together == list(reversed(shuffled))
    for row in range(24):
        own = settings[row]
        assert sample(logits[row : row + 1], [own], [generator_for(own)]) == [together[row]]


def test_ties_and_extremes() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, -1e30], [3e38, -3e38, 0.0, 0.0]])
    own = SamplingSettings(top_k=2, seed=0)
    drawn = {
        tuple(
            sample(
                logits, [own, own], [generator_for(SamplingSettings(seed=s)), generator_for(own)]
            )
        )
        for s in range(40)
    }
    assert drawn == {(0, 0), (1, 0)}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"stop": ("",)}, "stop"),
        ({"stop": "end"}, "stop"),
    ],
)
def test_bad_settings(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(UserError, match=f"{name} is .*must be"):
        SamplingSettings(**fields)


def test_seeds_of_rows() -> None:
    base = SamplingSettings(seed=7)
    assert [base.for_row(row).seed for row in range(3)] == [7, 8, 9]
    assert SamplingSettings().for_row(3).seed is None
    assert generator_for(base).initial_seed() == 7
    fresh = {generator_for(SamplingSettings()).initial_seed() for _ in range(4)}
    assert len(fresh) == 4
