"""`openzaya ablate`: what each part of the architecture wins, at equal parameters and data."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

    from openzaya.ablation.plan import PlannedRun

HELP = "train matched models with and without each part of MoE++, and compare them"

_EPILOG = """\
examples:
  openzaya ablate ablate                        5 variants, 3 sizes, 2 seeds: 30 runs, one by one
  openzaya ablate ablate --plan                 the models and their parameters; nothing is trained
  openzaya ablate ablate --steps 50 --sizes 96,128 --seeds 0 --out runs/quick    a first look
  openzaya ablate ablate --variants standard,moe++ --set phases.text.lr=2e-3 --out runs/slower
  openzaya ablate --report-only --json | jq .rows        what is finished so far

variants (each has as many parameters, total and active, as the standard MoE, within 1 %):
  standard   grouped-query attention, a linear router, plain residual sums
  cca        compressed convolutional attention in it
  router     the MLP router that averages over depth in it
  residual   learned residual scaling in it
  moe++      all three

A size is the width of the model; depth, head width and inner width follow it. Runs of one size and
seed see the same batches in the same order. Ctrl-C or SIGTERM saves; the same command goes on, and
repeats nothing that is finished. More sizes, seeds and variants may be added later; other steps or
other settings need another --out. OUT holds table.md, summary.json, curves.png and one ordinary run
a model (OUT/128-cca-0).
"""

_T = TypeVar("_T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument(
        "recipe", metavar="RECIPE", nargs="?", help="a TOML file, or a name in recipes/"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/ablation"),
        help="folder of this ablation (default: runs/ablation)",
    )
    parser.add_argument("--sizes", metavar="N,N,...", help="widths (default: 96,128,160)")
    parser.add_argument("--seeds", metavar="N,N,...", help="seeds (default: 0,1)")
    parser.add_argument("--variants", metavar="NAME,...", help="some of those below (default: all)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, metavar="N", help="of every run (default: recipe's)")
    length.add_argument("--tokens", type=float, metavar="N", help="of every run, instead of steps")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="a recipe field to change, in all runs; may be repeated",
    )
    parser.add_argument("--plan", action="store_true", help="show the models and do nothing")
    parser.add_argument(
        "--report-only", action="store_true", help="report what is finished in OUT; train nothing"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("--no-plot", action="store_true", help="no figure (needs no matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Run the verb."""
    from openzaya.errors import UserError

    wanted = _numbers("--sizes", args.sizes, 1), _numbers("--seeds", args.seeds, 0)
    names = _items("--variants", args.variants, str)
    for option, value in (("--steps", args.steps), ("--tokens", args.tokens)):
        if value is not None and not 1 <= value <= 10**15:
            raise UserError(f"{option} is {value:g}; it must be from 1 to 1e15.")
    if args.report_only:
        if args.recipe or args.set or any((*wanted, names, args.steps, args.tokens, args.plan)):
            raise UserError(
                "--report-only reports all that is finished in --out; it takes no recipe and "
                "nothing that chooses or changes runs."
            )
        return _report(args)
    if args.recipe is None:
        raise UserError("name a recipe, such as `openzaya ablate ablate`, or give --report-only.")
    if any(item.partition("=")[0] in ("name", "seed") for item in args.set):
        raise UserError(
            "an ablation names and seeds its own runs: choose --out and --seeds instead of name "
            "and seed."
        )
    from openzaya.ablation.plan import SEEDS, SIZES, base_recipe, plan_runs
    from openzaya.ablation.variants import VARIANTS
    from openzaya.config.load import load_recipe

    tokens = None if args.tokens is None else round(args.tokens)
    base = base_recipe(load_recipe(args.recipe, args.set), args.steps, tokens)
    variants = [name for name in VARIANTS if name in names] if names else list(VARIANTS)
    unknown = [name for name in names if name not in VARIANTS]
    runs = plan_runs(base, wanted[0] or SIZES, [*variants, *unknown], wanted[1] or SEEDS)
    if args.plan:
        _show_plan(runs, args.json)
        return 0
    if not args.no_plot:
        from openzaya.ablation.plots import check_matplotlib

        check_matplotlib()
    from openzaya.ablation.run import run_ablation
    from openzaya.train.stop import Stopped

    console = _console(args.json)
    try:
        run_ablation(base, runs, args.out, console)
    except Stopped as stopped:
        console.print("the same command goes on; --report-only reports what is finished")
        return stopped.exit_code
    return _report(args)


def _report(args: argparse.Namespace) -> int:
    """Report all that is finished."""
    from openzaya.ablation.report import show, write_report
    from openzaya.ablation.result import all_results
    from openzaya.ablation.summary import summarise

    summary = summarise(all_results(args.out))
    files = write_report(summary, args.out, plot=not args.no_plot)
    if args.json:
        print(json.dumps(summary.to_json(), indent=1))
        return 0
    show(summary, _console(False))
    print(f"written in {args.out}: " + ", ".join(file.name for file in files))
    return 0


def _console(to_stderr: bool) -> Console:
    """Where people look; stdout stays clean for JSON."""
    from rich.console import Console

    return Console(stderr=to_stderr)


def _show_plan(runs: list[PlannedRun], as_json: bool) -> None:
    """The models of a plan, each once."""
    from rich.console import Console
    from rich.table import Table

    from openzaya.model.accounting import count_parameters

    models = {(run.size, run.variant): run for run in runs}
    rows = []
    for run in models.values():
        model, counted = run.recipe.model, count_parameters(run.recipe.model)
        rows.append(
            {
                "size": run.size,
                "variant": run.variant,
                "layers": model.num_hidden_layers,
                "head_dim": model.head_dim,
                "inner": model.moe_intermediate_size,
                "router": model.router_hidden_size if model.router == "zaya" else None,
                "total": counted.total_without_embeddings,
                "active": counted.active_without_embeddings,
                "training_flops": run.training_flops,
            }
        )
    if as_json:
        print(json.dumps({"runs": [run.recipe.name for run in runs], "models": rows}, indent=1))
        return
    table = Table(title=f"{len(runs)} runs of {len(rows)} models", box=None, padding=(0, 1))
    for column in ("size", "variant", "layers", "head", "inner", "router", "total", "active"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    table.add_column("FLOPs a run", justify="right")
    for row in rows:
        *cells, flops = row.values()
        shown = [f"{cell:,}" if isinstance(cell, int) else str(cell or "-") for cell in cells]
        table.add_row(*shown, f"{flops:.3g}".replace("e+", "e"))
    Console(highlight=False).print(table)


def _numbers(option: str, text: str | None, least: int) -> list[int]:
    """A list of whole numbers, each once."""
    from openzaya.errors import UserError

    numbers = _items(option, text, int)
    if any(not least <= number <= 10**9 for number in numbers):
        raise UserError(f"{option} {text} has a number that is not from {least} to 1e9.")
    return numbers


def _items(option: str, text: str | None, kind: Callable[[str], _T]) -> list[_T]:
    """The parts of a list with commas, each once; none where the option was not given."""
    from openzaya.errors import UserError

    if text is None:
        return []
    try:
        items = [kind(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise UserError(f"{option} {text!r}: give whole numbers with commas between.") from error
    if not items or len(set(items)) < len(items):
        raise UserError(f"{option} {text!r}: name at least one, and each only once.")
    return items
