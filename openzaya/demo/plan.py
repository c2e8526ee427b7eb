"""Fit a recipe to the time at hand."""

from __future__ import annotations

import statistics
import time

import torch

from openzaya.config.recipe import Recipe
from openzaya.model.init import init_weights
from openzaya.model.model import Zaya
from openzaya.optim.groups import build_optimizers
from openzaya.train.setup import pick_device


def scaled(recipe: Recipe, total_steps: int) -> Recipe:
    """The recipe with its phases stretched or shrunk to `total_steps` steps in all.

    Ratios between phases stay (to rounding), and so do those of a phase's batch ramp and decay;
    warm-ups shrink with short phases; every phase keeps at least two steps.
    """
    ratio = total_steps / recipe.total_steps
    phases = []
    for phase in recipe.phases:
        steps = max(round(phase.steps * ratio), 2)
        warmup = min(phase.warmup_steps, steps // 4)
        ramp = [
            stage.model_copy(update={"steps": part})
            for stage in phase.batch_ramp
            if (part := int(stage.steps * steps / phase.steps))
        ]
        decay = phase.decay_steps * steps / phase.steps
        update = {
            "steps": steps,
            "tokens": None,
            "batch_ramp": tuple(ramp),
            "warmup_steps": warmup,
            "decay_steps": min(max(round(decay), 1), steps - warmup) if decay else 0,
        }
        phases.append(phase.model_copy(update=update))
    return recipe.model_copy(update={"phases": tuple(phases)})


def measure_rate(recipe: Recipe, steps: int = 3) -> float:
    """Tokens a second that this machine trains, by a few steps of a throwaway model.

    Takes the first phase's shapes; the first step, which pays for start-up, is not counted.
    """
    phase, device = recipe.phases[0], pick_device(recipe)
    if recipe.run.threads:
        torch.set_num_threads(recipe.run.threads)
    model = Zaya(recipe.model, getattr(torch, recipe.run.compute_dtype))
    init_weights(model, seed=0)
    model.to(device)
    optimizers = build_optimizers(model, recipe.optimizer)
    shape = (phase.micro_sequences, phase.context)
    tokens = torch.randint(0, recipe.model.vocab_size, shape, device=device)
    positions = torch.arange(phase.context, device=device) % (phase.context // 2)
    positions = positions.expand(shape)
    seconds = []
    for _ in range(1 + steps):
        started = time.perf_counter()
        for _ in range(phase.batch_sequences // phase.micro_sequences):
            hidden = model(tokens, positions=positions).hidden
            (model.loss(hidden, tokens) / tokens.numel()).backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        float(model.head_weight[0, 0].detach())  # wait for the device
        seconds.append(time.perf_counter() - started)
    return phase.batch_sequences * phase.context / statistics.median(seconds[1:])


def fitted(recipe: Recipe, seconds: float, rate: float) -> Recipe:
    """The recipe with as many steps as `seconds` allow at `rate` tokens a second."""
    steps = recipe.total_steps * seconds * rate / recipe.total_tokens
    return scaled(recipe, max(int(steps), 1))
