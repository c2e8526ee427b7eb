"""Which runs an ablation consists of, as ordinary recipes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from openzaya.ablation.variants import VARIANTS, matched, sized
from openzaya.config.recipe import Recipe
from openzaya.demo.plan import scaled
from openzaya.errors import UserError
from openzaya.model.accounting import TRAINING_FACTOR, forward_flops
from openzaya.model.config import ModelConfig

SIZES, SEEDS = (96, 128, 160), (0, 1)
"""What is trained unless told otherwise."""

_NEVER = 1_000_000_000
"""Steps between evaluations, so that there is one only where a phase ends."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of an ablation.

    Attributes:
        size: width of the residual stream.
        variant: a key of `VARIANTS`.
        seed: of weights and of the order of the data.
        recipe: what the trainer is given.
    """

    size: int
    variant: str
    seed: int
    recipe: Recipe

    @property
    def label(self) -> str:
        """For people."""
        return f"size {self.size}, {self.variant}, seed {self.seed}"

    @property
    def training_flops(self) -> float:
        """FLOPs of all steps, attention scores and LM head included, padding as if it were text.

        The whole of 6 N D (N active parameters, D tokens) is there, and scores come on top; norms
        and other elementwise work and the optimizers' own products are not counted.
        """
        return sum(
            TRAINING_FACTOR
            * forward_flops(self.recipe.model, phase.context).total
            * phase.total_tokens
            for phase in self.recipe.phases
        )


def base_recipe(recipe: Recipe, steps: int | None = None, tokens: int | None = None) -> Recipe:
    """What all runs have in common, checked.

    Args:
        recipe: as its author wrote it.
        steps: of every run in all; None leaves what the recipe says.
        tokens: of every run in all, instead of `steps`; rounded to whole steps.

    Raises:
        UserError: if no fair comparison can be made of it.
    """
    if recipe.start_from is not None:
        raise UserError(
            "an ablation compares models from their first step on, so start_from has no place in "
            f"its recipe: take {recipe.start_from!r} out."
        )
    if recipe.model.layer_types is not None:
        raise UserError(
            "model.layer_types names the layers of one depth, but depth follows the size here: "
            "leave it out."
        )
    last = recipe.phases[-1]
    if not recipe.evaluated(last):
        raise UserError(
            f"phase {last.name!r} mixes no source with held-out documents, so there is nothing to "
            "compare: set `heldout` of a source above 0."
        )
    if tokens is not None:
        steps = max(round(recipe.total_steps * tokens / recipe.total_tokens), 1)
    if steps is not None:
        recipe = scaled(recipe, steps)
    run = recipe.run.model_copy(update={"eval_every": _NEVER})
    return recipe.model_copy(update={"run": run})


def plan_runs(
    base: Recipe, sizes: Sequence[int], variants: Sequence[str], seeds: Sequence[int]
) -> list[PlannedRun]:
    """All runs, seed by seed and small sizes first, so that an early stop leaves whole rows.

    Args:
        base: from `base_recipe`.

    Raises:
        UserError: if a size has no matching models, or a variant is unknown.
    """
    unknown = [variant for variant in variants if variant not in VARIANTS]
    if unknown:
        raise UserError(f"no variant {unknown[0]!r}; there are {', '.join(VARIANTS)}.")
    models: dict[tuple[int, str], ModelConfig] = {}
    for size in sizes:
        standard = sized(base.model, size)
        for variant in variants:
            models[size, variant] = matched(standard, variant)
    return [
        PlannedRun(
            size,
            variant,
            seed,
            base.model_copy(
                update={"name": run_name(size, variant, seed), "seed": seed, "model": model}
            ),
        )
        for seed in sorted(seeds)
        for (size, variant), model in sorted(models.items(), key=lambda item: item[0][0])
    ]


def run_name(size: int, variant: str, seed: int) -> str:
    """Name of a run and its folder; names of runs have no plus signs."""
    return f"{size}-{variant.replace('+', 'p')}-{seed}"
