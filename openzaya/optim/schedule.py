"""Learning rate as a pure function of the step within a phase."""

from __future__ import annotations

import math

from openzaya.config.recipe import PhaseConfig


def learning_rate(phase: PhaseConfig, step: int) -> float:
    """Learning rate of 0-based `step` of `phase`.

    Linear warm-up that reaches the peak at step `warmup_steps`, then the phase's schedule, which
    reaches `lr_final` at the last step. "wsd" is warm-up, stable, decay: the peak is held until the
    last `decay_steps` steps.
    """
    if step < phase.warmup_steps:
        return phase.lr * (step + 1) / (phase.warmup_steps + 1)
    if phase.schedule == "constant":
        return phase.lr
    if phase.schedule == "wsd":
        left = min((phase.steps - 1 - step) / phase.decay_steps, 1.0)
        return phase.lr_final + (phase.lr - phase.lr_final) * left
    span = max(phase.steps - 1 - phase.warmup_steps, 1)
    done = min((step - phase.warmup_steps) / span, 1.0)
    left = 1 - done if phase.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return phase.lr_final + (phase.lr - phase.lr_final) * left
