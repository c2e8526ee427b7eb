"""Train all runs of an ablation, one after another; stopped anywhere, the next start goes on."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from openzaya.ablation.plan import PlannedRun
from openzaya.ablation.result import Result, check_texts, read_result, record
from openzaya.ablation.variants import VARIANTS
from openzaya.checkpoint.atomic import write_text
from openzaya.config.load import differences, load_recipe, recipe_to_toml
from openzaya.config.recipe import Recipe
from openzaya.errors import UserError
from openzaya.train.setup import RECIPE, exclusive
from openzaya.train.stop import StopRequest
from openzaya.train.trainer import train

BASE = "ablation.toml"
"""What all runs of a folder have in common."""


def run_ablation(base: Recipe, runs: Sequence[PlannedRun], out: Path, console: Console) -> None:
    """Train what is not finished yet.

    Args:
        base: what the runs have in common; a folder takes runs of one base only.
        runs: in the order of training.
        out: the ablation's folder; a run lives in `out/<its recipe's name>`.
        console: told which run is on, how long all will take, and the losses so far.

    Raises:
        UserError: as in `train`, and if `out` holds another ablation.
        Stopped: after SIGTERM or Ctrl-C, with the state saved.
    """
    with StopRequest(), exclusive(out):  # between runs nothing needs saving
        _claim(base, out)
        results: list[Result] = []
        for planned in runs:
            folder = out / planned.recipe.name
            _check_recipe(planned.recipe, folder)
            if (result := read_result(folder)) is not None:
                results.append(result)
        check_texts(results, out)
        finished = {(r.size, r.variant, r.seed) for r in results}
        if finished:
            console.print(f"{len(finished)} of {len(runs)} runs are finished already")
        for number, planned in enumerate(runs, 1):
            if (planned.size, planned.variant, planned.seed) in finished:
                continue
            left = time_left(runs[number - 1 :], results)
            say = f"run {number} of {len(runs)}: {planned.label}"
            console.print(Text(f"\n{say}{left and f', {left} left in all'}", style="bold"))
            train(planned.recipe, out, console)
            results.append(record(planned, out / planned.recipe.name))
            check_texts(results, out)
            console.print(losses_so_far(results, planned.size), highlight=False, soft_wrap=True)


def _claim(base: Recipe, out: Path) -> None:
    """Make a folder this ablation's; more sizes, seeds and variants may come later."""
    file = out / BASE
    if not file.is_file():
        write_text(file, recipe_to_toml(base))
        return
    changed = differences(load_recipe(str(file)), base)
    if changed:
        raise UserError(
            f"{out} holds an ablation of another recipe, and losses of the two cannot be "
            "compared: choose another folder with --out. What differs:\n  " + "\n  ".join(changed)
        )


def _check_recipe(recipe: Recipe, folder: Path) -> None:
    """A run that has begun must be the planned one, before hours go into the others."""
    if not (folder / RECIPE).is_file():
        return
    changed = differences(load_recipe(str(folder / RECIPE)), recipe)
    if changed:
        raise UserError(
            f"{folder} holds a run of another recipe: remove it, or choose another folder with "
            "--out. What differs:\n  " + "\n  ".join(changed)
        )


def time_left(runs: Iterable[PlannedRun], results: Sequence[Result]) -> str:
    """How long runs will take, as "m:ss" or "h:mm:ss"; empty before the first is finished.

    A run takes what runs of its size took, else what the nearest size took, by their FLOPs.
    """
    if not results:
        return ""
    finished = {(r.size, r.variant, r.seed) for r in results}
    seconds = 0.0
    for planned in runs:
        if (planned.size, planned.variant, planned.seed) in finished:
            continue
        nearest = min(results, key=lambda r: abs(r.size - planned.size)).size
        of_size = [r for r in results if r.size == nearest]
        flops = statistics.mean(r.training_flops for r in of_size)
        seconds += statistics.mean(r.seconds for r in of_size) * planned.training_flops / flops
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def losses_so_far(results: Sequence[Result], size: int) -> str:
    """Mean held-out loss of every variant of a size over the seeds that are finished."""
    parts = []
    for variant in VARIANTS:
        losses = [r.loss for r in results if (r.size, r.variant) == (size, variant)]
        if losses:
            parts.append(f"{variant} {statistics.mean(losses):.3f}")
    return f"so far at {size}: " + "  ".join(parts)
