"""How the cost of our training step grows: with batch, context, experts, layers and width.

    python benchmarks/train_growth.py [--only TABLE] [--rounds 2] [--plot FILE.png] [--json]

Every row is a process of its own, so that peak memory is its own (beyond what the process takes
with a tiny model). `due` is by how much the row's work exceeds the first row's: FLOPs of its
products, attention's quadratic part included (`openzaya inspect` counts the same), whose share is
under `scores`; for layers, their number. `took` is by how much its forward and backward took
longer. A table passes if from no row to a later one they took more than a quarter longer than was
due. Experts are top-1: with more of them the work stays, and only the optimizer has more to do.
All tables together take about ten minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from common import GEOMETRIES, Job, alternate, figure, milliseconds, table
from rich.console import Console

from openzaya.model.accounting import count_parameters, forward_flops

BASE = GEOMETRIES["small"]
LIMIT = 1.25
"""By how much a row may exceed what was due."""


@dataclass(frozen=True)
class Sweep:
    """One table.

    Attributes:
        title: what grows.
        expected: in words.
        values: of what grows.
        job: of one value.
        work: that time is due to.
    """

    title: str
    expected: str
    values: tuple[int, ...]
    job: Callable[[int], Job]
    work: Callable[[Job], float] = lambda job: job.flops


def changed(**fields: int) -> Job:
    """The small geometry with other sizes."""
    return Job(config=BASE.model_copy(update=fields))


def wide(width: int) -> Job:
    """Heads of the same size, as many more of them."""
    return changed(
        hidden_size=width,
        moe_intermediate_size=width,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 128,
    )


SWEEPS = {
    "batch": Sweep(
        "sequences of 512 tokens",
        "time linear; memory linear beside weights and optimizer",
        (1, 2, 4, 8, 16),
        lambda n: Job(config=BASE, batch=n),
    ),
    "context": Sweep(
        "context, 8,192 tokens in all",
        "time flat but for attention's scores, which are linear; memory flat",
        (512, 1024, 2048, 4096, 8192),
        lambda n: Job(config=BASE, batch=8192 // n, context=n),
    ),
    "sequence": Sweep(
        "context of one sequence",
        "time linear, attention's scores quadratic; memory linear",
        (512, 1024, 2048, 4096, 8192, 16_384),
        lambda n: Job(config=BASE, batch=1, context=n),
    ),
    "experts": Sweep(
        "experts a layer, one of them active, 8 x 512 tokens",
        "time flat; optimizer and memory linear in parameters",
        (4, 8, 16, 32, 64),
        lambda n: changed(num_experts=n),
    ),
    "layers": Sweep(
        "layers, 8 x 512 tokens",
        "time and memory linear, beside embedding and head",
        (2, 4, 6, 8, 10, 12),
        lambda n: changed(num_hidden_layers=n),
        # The head has two thirds of the FLOPs beside two layers, but less of the time.
        work=lambda job: job.config.num_hidden_layers,
    ),
    "width": Sweep(
        "width, heads and expert width in proportion, 8 x 512 tokens",
        "time between linear (passes over activations) and quadratic (products)",
        (128, 256, 512, 768),
        wide,
    ),
}


def run(sweep: Sweep, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one table."""
    jobs = {str(n): sweep.job(n).model_copy(update={"threads": args.threads}) for n in sweep.values}
    results = alternate(jobs, args.rounds, args.steps, args.warmup, together=False)
    rows = []
    for value, job, result in zip(sweep.values, jobs.values(), results.values(), strict=True):
        flops = forward_flops(job.config, job.context)
        rows.append(
            {
                "value": value,
                "tokens": job.tokens,
                "step": result.median,
                "without_optimizer": result.without_optimizer,
                "peak_mib": result.peak_mib,
                "parameters": count_parameters(job.config).total,
                "step_flops": job.flops,
                "work": sweep.work(job),
                "share_of_scores": flops.scores / flops.total,
            }
        )
    for row in rows:
        row["due"] = row["work"] / rows[0]["work"]
        row["took"] = row["without_optimizer"] / rows[0]["without_optimizer"]
    return rows


def worst(rows: list[dict[str, Any]]) -> float:
    """By how much growth from any row to any later one exceeds what was due between them."""
    excess = [row["took"] / row["due"] for row in rows]
    return max(later / earlier for earlier, later in combinations(excess, 2))


def show(sweep: Sweep, rows: list[dict[str, Any]], console: Console) -> None:
    """One table and its verdict."""
    lines = [
        (
            f"{row['value']:,}",
            f"{row['tokens'] / row['step']:,.0f}",
            milliseconds(row["step"]),
            milliseconds(row["without_optimizer"]),
            f"{row['peak_mib']:,.0f}",
            f"{row['share_of_scores']:.0%}",
            f"{row['due']:.2f}",
            f"{row['took']:.2f}",
        )
        for row in rows
    ]
    columns = ("", "tokens/s", "step ms", "no opt.", "peak MiB", "scores", "due", "took")
    console.print(table(sweep.title, columns, lines))
    over = worst(rows)
    verdict = "as it should" if over <= LIMIT else f"MORE than the limit of {LIMIT:.2f}"
    console.print(
        f"expected: {sweep.expected}\nat worst {over:.2f} times what was due: {verdict}\n"
    )


def draw(results: dict[str, list[dict[str, Any]]], path: Path | None, console: Console) -> None:
    """Time over what grows: measured, and the first row's scaled by the work."""
    drawing = figure(path, len(results), console)
    if drawing is None:
        return
    picture, axes = drawing
    for axis, (name, rows) in zip(axes, results.items(), strict=True):
        values = [row["value"] for row in rows]
        first = rows[0]["without_optimizer"]
        axis.loglog(values, [row["step"] for row in rows], "o-", label="step")
        axis.loglog(
            values, [row["without_optimizer"] for row in rows], "s-", label="without the optimizer"
        )
        axis.loglog(values, [first * row["due"] for row in rows], "k:", label="due to its work")
        axis.set_xticks(values, [f"{value:,}" for value in values])
        axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        axis.set_ylim(bottom=first / 2)
        axis.set(title=name, xlabel=SWEEPS[name].title, ylabel="seconds")
        axis.legend()
    picture.savefig(path)
    console.print(f"drawn: {path}")


def main() -> None:
    """Print one table for each thing that grows; exit code 1 if one grows more than it should."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=[*SWEEPS], action="append", help="may be repeated")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="passes over each table")
    parser.add_argument("--steps", type=int, default=3, help="steps of a row in a pass")
    parser.add_argument("--warmup", type=int, default=2, help="steps of a process not counted")
    parser.add_argument("--plot", type=Path, default=None, help="draw into this file")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    notes, console = Console(stderr=True), Console()
    results = {}
    for name in args.only or SWEEPS:
        notes.print(f"measuring {name}", style="dim")
        results[name] = run(SWEEPS[name], args)
        if not args.json:
            show(SWEEPS[name], results[name], console)
    draw(results, args.plot, notes)
    if args.json:
        print(json.dumps(results))
    sys.exit(any(worst(rows) > LIMIT for rows in results.values()))


if __name__ == "__main__":
    main()
