"""Budgets in tokens, batch ramps and moving mixtures of a phase."""

import pytest
from pydantic import ValidationError

from openzaya.config.load import load_recipe
from openzaya.config.recipe import PhaseConfig
from openzaya.demo.plan import scaled


def phase(**fields):
    base = {
        "name": "p",
        "context": 8,
        "batch_sequences": 16,
        "micro_sequences": 2,
        "mixture": {"a": 1.0},
        "lr": 1.0,
        "lr_final": 0.1,
    }
    return PhaseConfig.model_validate({**base, **fields})


RAMP = [{"batch_sequences": 4, "steps": 3}, {"batch_sequences": 8, "steps": 2}]


@pytest.mark.parametrize("ramp", [[], RAMP])
@pytest.mark.parametrize("tokens", [2_000, 2_048, 2_049])
def test_a_budget_of_tokens_is_reached_by_the_last_step_and_not_before(ramp, tokens):
    p = phase(tokens=tokens, batch_ramp=ramp)
    assert p.slot(p.steps - 1) * 8 < tokens <= p.total_tokens
    assert phase(**p.model_dump(exclude={"name"})) == p


def test_slots_are_prefix_sums_of_the_batches():
    p = phase(steps=9, batch_ramp=RAMP)
    sizes = [p.sequences(step) for step in range(9)]
    assert sizes == [4] * 3 + [8] * 2 + [16] * 4
    assert [p.slot(step) for step in range(10)] == [sum(sizes[:step]) for step in range(10)]
    assert p.total_tokens == sum(sizes) * 8


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "give it steps, or tokens"),
        ({"tokens": 2_000, "steps": 3}, "tokens = 2000 are 16 steps, but steps is 3"),
        ({"steps": 5, "batch_ramp": RAMP}, "batch_ramp lasts 5 steps; the phase has 5"),
        ({"tokens": 64, "batch_ramp": RAMP}, "batch_ramp lasts 5 steps"),
        ({"steps": 9, "batch_ramp": [{"batch_sequences": 3, "steps": 1}]}, r"\(3\) must be a mult"),
        ({"steps": 9, "mixture_final": {"a": 0.0}}, "shares of the mixture_final sum to zero"),
        ({"steps": 9, "schedule": "wsd"}, "decay_steps belongs to schedule wsd"),
        ({"steps": 9, "decay_steps": 2}, "decay_steps belongs to schedule wsd"),
        (
            {"steps": 9, "schedule": "wsd", "decay_steps": 6, "warmup_steps": 4},
            "warmup_steps and decay_steps are more than its 9",
        ),
    ],
)
def test_what_does_not_fit_together_is_said(fields, message):
    with pytest.raises(ValidationError, match=message):
        phase(**fields)


def test_a_scaled_phase_keeps_its_shape():
    recipe = load_recipe("tiny")
    whole = phase(
        steps=100,
        batch_ramp=[{"batch_sequences": 4, "steps": 20}, {"batch_sequences": 8, "steps": 2}],
        schedule="wsd",
        decay_steps=30,
        warmup_steps=10,
    )
    half = scaled(recipe.model_copy(update={"phases": (whole,)}), 10).phases[0]
    assert (half.steps, half.decay_steps, half.warmup_steps) == (10, 3, 2)
    assert [(s.batch_sequences, s.steps) for s in half.batch_ramp] == [(4, 2)]
    assert PhaseConfig.model_validate(half.model_dump()) == half


def test_shares_name_every_source_with_its_largest():
    p = phase(steps=2, mixture={"a": 3.0, "b": 1.0}, mixture_final={"b": 1.0, "c": 1.0})
    assert p.shares == {"a": 0.75, "b": 0.5, "c": 0.5}
