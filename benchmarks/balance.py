"""How evenly the experts are loaded: controller, no controller, linear router, on the demo's data.

    python benchmarks/balance.py [--steps 500] [--out FOLDER] [KEY=VALUE ...]

Trains the demo recipe's model on its own phases, shortened to `--steps` steps in all, once per
variant, and prints for each stretch of 50 steps the load entropy (1 is perfectly even) of the least
even layer: in the worst single step, in the median step, and of the loads summed over the stretch.
Averages hide flipping, hence the first column; figures of every step are in metrics.jsonl.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from openzaya.config.load import load_recipe
from openzaya.config.recipe import Recipe
from openzaya.demo.plan import scaled
from openzaya.optim.balance import load_entropy
from openzaya.train.metrics import read_metrics
from openzaya.train.trainer import train

WINDOW = 50
VARIANTS = {
    "controller": [],
    "no controller": ["balance.enabled=false"],
    "linear router": ["model.router=linear"],
    "linear, no controller": ["model.router=linear", "balance.enabled=false"],
}


def run(recipe: Recipe, out: Path) -> list[tuple[str, float, float, float, float]]:
    """Train, and return per window: (steps, worst step, median step, window, loss)."""
    train(recipe, out, Console(quiet=True))
    records = [r for r in read_metrics(out / recipe.name) if "load" in r]
    rows = []
    for start in range(0, len(records), WINDOW):
        part = records[start : start + WINDOW]
        single = [min(r["load_entropy"]) for r in part]
        total = torch.tensor([r["load"] for r in part]).sum(0)
        window = float(load_entropy(total, recipe.model.num_experts).min())
        loss = statistics.mean(r["loss"] for r in part)
        steps = f"{part[0]['step']}-{part[-1]['step']}"
        rows.append((steps, min(single), statistics.median(single), window, loss))
    return rows


def main() -> None:
    """Print one table per variant."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--out", type=Path, default=None, help="keep the runs here")
    parser.add_argument("--only", choices=list(VARIANTS), default=None)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as scratch:
        out = args.out or Path(scratch)
        for label, overrides in VARIANTS.items():
            if args.only not in (None, label):
                continue
            name = "balance-" + label.replace(", ", "-").replace(" ", "-")
            recipe = load_recipe(
                "demo",
                [*args.overrides, *overrides, f"name={name}", "run.eval_every=0"],
            )
            table = Table("steps", "worst step", "median step", "window", "loss", title=label)
            for steps, *figures in run(scaled(recipe, args.steps), out):
                table.add_row(steps, *(f"{figure:.3f}" for figure in figures))
            console.print(table)


if __name__ == "__main__":
    main()
