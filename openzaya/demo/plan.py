"""Fit a recipe to the time at hand."""

from __future__ import annotations

from openzaya.config.recipe import PhaseConfig, Recipe


def scaled(recipe: Recipe, total_steps: int) -> Recipe:
    """The recipe with its phases stretched or shrunk to `total_steps` steps in all.

    Ratios between phases stay (to rounding); warm-ups shrink with short phases; every phase keeps
    at least two steps.
    """
    phases = []
    for phase in recipe.phases:
        steps = max(round(phase.steps * total_steps / recipe.total_steps), 2)
        warmup = min(phase.warmup_steps, steps // 4)
        phases.append(phase.model_copy(update={"steps": steps, "warmup_steps": warmup}))
    return recipe.model_copy(update={"phases": tuple(phases)})


def step_tokens(phase: PhaseConfig) -> int:
    """Tokens of one global batch, padding included."""
    return phase.batch_sequences * phase.context
