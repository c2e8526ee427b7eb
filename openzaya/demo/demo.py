"""`openzaya demo`: plan, train, examine, show."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from openzaya.checkpoint.atomic import write_text
from openzaya.config.load import load_recipe
from openzaya.config.recipe import Recipe
from openzaya.data.tasks import Task
from openzaya.demo.exam import take_exam
from openzaya.demo.plan import fitted, measure_rate
from openzaya.errors import UserError
from openzaya.evals.arithmetic import problems
from openzaya.kernels.allocator import reuse_freed_memory
from openzaya.serve.loading import open_checkpoint
from openzaya.train.metrics import read_metrics
from openzaya.train.setup import RECIPE
from openzaya.train.trainer import train

DEFAULT_MINUTES = 10.0
PROBLEMS = 210
"""Held-out problems of the exam, 30 of each kind."""

REPORT = "report.json"
_SET_UP_SECONDS = 25.0
"""Tokenizer, sources and start-up, before training."""
_AFTER_SHARE = 0.12
"""Share of the time for held-out losses, checkpoints and the exam."""
_REPLY_TOKENS = 160


def run_demo(
    minutes: float,
    out: Path,
    console: Console,
    overrides: Sequence[str] = (),
    exam_problems: int = PROBLEMS,
) -> Path:
    """Train the small preset, examine it, and print a report; continue if there is a start.

    Args:
        minutes: time that everything together should take.
        out: folder of runs.
        console: where it is shown.
        overrides: `key=value` changes of the recipe.
        exam_problems: held-out problems to put to the model.

    Returns:
        The run's folder.

    Raises:
        UserError: as in `train`.
        Stopped: after SIGTERM or Ctrl-C while training, with the state saved.
    """
    reuse_freed_memory()
    name = "demo" if minutes == DEFAULT_MINUTES else f"demo-{minutes:g}-minutes"
    folder = out / name
    recipe = _planned(name, minutes, folder, console, overrides)
    console.print(_introduction(recipe, minutes))
    final = train(recipe, out, console)
    report = _report(folder, final, console, exam_problems)
    _show(report, console)
    return folder


def _planned(
    name: str, minutes: float, folder: Path, console: Console, overrides: Sequence[str]
) -> Recipe:
    """The recipe of an earlier start, else one that fits this machine and `minutes`."""
    if (folder / RECIPE).is_file():
        if overrides:
            raise UserError(
                f"{folder} is planned already, so {' '.join(overrides)} comes too late: remove the "
                "folder, or choose another one with --out."
            )
        return load_recipe(str(folder / RECIPE))
    if any(override.partition("=")[0] == "name" for override in overrides):
        raise UserError("the demo names its own run; choose another folder with --out.")
    recipe = load_recipe("demo", [f"name={name}", *overrides])
    with console.status("measuring how fast this machine trains"):
        rate = measure_rate(recipe)
    seconds = max(minutes * 60 - _SET_UP_SECONDS, 5) * (1 - _AFTER_SHARE)
    return fitted(recipe, seconds, rate)


def _introduction(recipe: Recipe, minutes: float) -> Panel:
    model = recipe.model
    text = Text()
    text.append(
        f"A ZAYA1-style model from scratch: {model.num_hidden_layers} layers of compressed "
        f"convolutional attention and {model.num_experts} experts. It starts as noise.\n\n"
    )
    for phase in recipe.phases:
        mixture = ", ".join(f"{name} {share:.0%}" for name, share in phase.mixture.items())
        text.append(f"{phase.name:<8}", style="bold")
        text.append(f"{phase.steps:>5} steps, context {phase.context:>4}\n")
        text.append(f"        {mixture}\n", style="dim")
    text.append(
        f"\nAbout {minutes:g} minutes. Ctrl-C saves; the same command continues.", style="dim"
    )
    return Panel(text, title="openzaya demo", width=78)


def _report(folder: Path, final: Path, console: Console, count: int) -> dict[str, Any]:
    """The exam's result, from the earlier run of it if there is one."""
    file = folder / REPORT
    with suppress(OSError, ValueError):  # absent or damaged: the exam is sat (again)
        report: dict[str, Any] = json.loads(file.read_text())
        return report
    model, tokenizer = open_checkpoint(final)
    posed = problems((), count, seed=0)
    started = time.perf_counter()
    with Progress(
        TextColumn("exam"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as progress:
        task = progress.add_task("exam", total=len(posed))
        result, replies = take_exam(
            model, tokenizer, posed, _REPLY_TOKENS, lambda n: progress.update(task, completed=n)
        )
    records = read_metrics(folder)
    steps = [record for record in records if "loss" in record]
    heldout = [record for record in records if "heldout" in record]
    report = {
        "training": {
            "steps": steps[-1]["step"],
            "tokens": steps[-1]["tokens"],
            "minutes": sum(record["seconds"] for record in steps) / 60,
        },
        "heldout_loss": {
            "first": heldout[0]["heldout"] if heldout else {},
            "last": heldout[-1]["heldout"] if heldout else {},
        },
        "load_entropy": steps[-1]["load_entropy"],
        "exam": {
            "seconds": time.perf_counter() - started,
            "kinds": {kind: asdict(accuracy) for kind, accuracy in result.kinds.items()},
            "overall": asdict(result.overall),
        },
        "example": _example(posed, replies),
    }
    write_text(file, json.dumps(report, indent=1) + "\n")
    return report


def _example(posed: list[Task], replies: list[str]) -> dict[str, str]:
    """The first story problem, or the first problem: right or wrong, not picked to please."""
    place = next((i for i, task in enumerate(posed) if task.kind == "story"), 0)
    return {
        "question": posed[place].question,
        "reply": replies[place],
        "answer": posed[place].answer,
    }


def _show(report: dict[str, Any], console: Console) -> None:
    losses = Table("source", "first", "last", title="held-out loss, nats per token")
    first, last = report["heldout_loss"]["first"], report["heldout_loss"]["last"]
    for source, loss in last.items():
        before = f"{first[source]:.3f}" if source in first else ""
        losses.add_row(source, before, f"{loss:.3f}")
    console.print(losses)
    exam = report["exam"]
    table = Table("task", "right", "accuracy", "95 % interval", "chance", title="held-out problems")
    for kind, a in [*exam["kinds"].items(), ("all", exam["overall"])]:
        table.add_row(
            kind,
            f"{a['correct']}/{a['total']}",
            f"{a['correct'] / a['total']:.1%}",
            f"{a['low']:.1%} to {a['high']:.1%}",
            f"{a['chance']:.1%}",
            end_section=kind == list(exam["kinds"])[-1],
        )
    console.print(table)
    example = report["example"]
    console.print(Text(f"One of them: {example['question']}", style="bold"))
    console.print(Text(example["reply"], style="dim"))
    training = report["training"]
    console.print(
        f"Trained {training['steps']} steps on {training['tokens'] / 1e6:.1f}M tokens in "
        f"{training['minutes']:.1f} minutes; the least even layer's load entropy is "
        f"{min(report['load_entropy']):.3f}.",
        highlight=False,
    )
