"""`openzaya trace`: write the numbers of every sub-layer, and find where two models part."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from openzaya.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from openzaya.checkpoint.trace_compare import Comparison, Stage
    from openzaya.checkpoint.trace_file import Trace

HELP = "record a model sub-layer by sub-layer, and find where another one parts from it"

_EPILOG = """\
examples:
  openzaya trace runs/first --out first.safetensors     write a trace
  openzaya trace runs/first --compare first.safetensors compute again and compare
  openzaya trace port.safetensors --compare golden      check another implementation
  openzaya trace golden --dtype bfloat16 --compare golden

`golden` is a tiny model that comes with the package, and its trace; its folder is printed by
  python -c "from openzaya.checkpoint.trace_file import GOLDEN; print(GOLDEN)"
To check another implementation: run it on probe.tokens, probe.positions and probe.padding_mask of
a trace, write what it has of the tensors under the same names, and copy the file's metadata.

exit code: 0 when the two agree, 1 when they part, 2 for bad input
"""

_WORD = "golden"
_WIDTH = 78
_SHOWN = 12
"""Flips and names that are listed one by one."""

_PARTS = ("attention", "residual_attention", "router", "experts", "residual_experts")
"""Sub-layers of a layer: the part of a stage's name after the layer's number."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument(
        "model",
        metavar="CHECKPOINT|FILE|golden",
        help="a model folder or a training run, whose trace is computed; or the file of a trace",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the computed trace there")
    parser.add_argument(
        "--compare",
        metavar="FILE|golden",
        help="the trace that is the reference; a checkpoint then runs on this trace's inputs",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="accepted drift: largest difference over largest magnitude "
        "(default: 2e-5, or 5e-2 where one of the two is not float32)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of the checkpoint's matrix products (default: float32)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Run the verb."""
    from openzaya.checkpoint.trace_compare import compare
    from openzaya.checkpoint.trace_file import GOLDEN_TRACE, read_trace, write_trace

    from_file = args.model != _WORD and Path(args.model).is_file()
    _check(args, from_file)
    reference = None
    if args.compare == _WORD:
        reference = read_trace(GOLDEN_TRACE, complete=True)
    elif args.compare is not None:
        reference = read_trace(Path(args.compare))
    trace = read_trace(Path(args.model)) if from_file else _compute(args, reference)
    if args.out is not None:
        write_trace(args.out, trace)
        if not args.json:
            print(f"wrote {len(trace.tensors)} stages to {args.out}")
    if reference is None:
        if args.json:
            print(json.dumps({"out": str(args.out), "stages": list(trace.tensors)}))
        return 0
    comparison = compare(reference, trace, args.tolerance)
    if args.json:
        names = {"reference": args.compare, "other": args.model}
        print(json.dumps({**names, **comparison.to_json()}, indent=2))
    else:
        _print(comparison, args)
    return 0 if comparison.agrees else 1


def _check(args: argparse.Namespace, from_file: bool) -> None:
    """Refuse what does not fit together, before anything is opened."""
    if args.out is None and args.compare is None:
        raise UserError("nothing to do: give --out FILE, --compare FILE, or both")
    if from_file and args.out is not None:
        raise UserError(f"{args.model} is a trace already; --out needs a checkpoint to compute one")
    if from_file and args.dtype is not None:
        raise UserError(f"{args.model} is a trace already; --dtype is for a checkpoint")
    if args.tolerance is not None and not 0 <= args.tolerance < float("inf"):
        raise UserError(f"--tolerance is {args.tolerance}; it must be a number from 0 on")


def _compute(args: argparse.Namespace, reference: Trace | None) -> Trace:
    """The trace of a checkpoint, on the reference's inputs where there is one."""
    import torch

    from openzaya.checkpoint.load import load_model
    from openzaya.checkpoint.run import find_checkpoint
    from openzaya.checkpoint.trace_file import GOLDEN, make_trace

    folder = GOLDEN if args.model == _WORD else find_checkpoint(args.model)
    dtype = torch.bfloat16 if args.dtype == "bfloat16" else torch.float32
    model = load_model(folder, dtype)
    return make_trace(model, None if reference is None else reference.probe)


def _print(comparison: Comparison, args: argparse.Namespace) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, markup=False)
    first = comparison.first
    if first is None or first is not comparison.stages[0] or first.problem is None:
        for table in _tables(comparison):
            console.print(table)
        outside = [s for s in comparison.stages if s.layer is None]
        console.print("   ".join(f"{stage.name} {_drift([stage])}" for stage in outside))
    for line in (*_notes(comparison), _sentence(comparison, args.model, args.compare)):
        console.print(fill(line, _WIDTH, break_long_words=False, break_on_hyphens=False))


def _tables(comparison: Comparison) -> Iterable[Table]:
    """Worst drift per layer and sub-layer, and the flips."""
    layers: dict[int, dict[str, list[Stage]]] = {}
    for stage in comparison.stages:
        if stage.layer is not None:
            part = stage.name.split(".")[2]
            part = "experts" if part == "skip" else part
            layers.setdefault(stage.layer, {}).setdefault(part, []).append(stage)
    flips = {layer: [f for f in comparison.flips if f.layer == layer] for layer in layers}
    rows = []
    for layer, parts in layers.items():
        near = sum(flip.near_tie for flip in flips[layer])
        tokens = min(stage.tokens for stages in parts.values() for stage in stages)
        cells = [_drift(parts.get(part, [])) for part in _PARTS]
        rows.append((str(layer), *cells, str(near), str(len(flips[layer]) - near), str(tokens)))
    heads = ("layer", "attn", "residual", "router", "experts", "residual", "near", "real", "tokens")
    title = f"largest drift (! above {comparison.tolerance:.1e}), flips, tokens compared"
    yield _table(title, heads, rows)
    if comparison.flips:
        flip_rows = [
            (
                *(str(n) for n in (f.layer, f.row, f.column)),
                f"{f.reference} -> {f.other}",
                "?" if f.margin is None else f"{f.margin:.1e}",
                f"{f.explained:.1e}",
                "near tie" if f.near_tie else "real",
            )
            # The ones that matter first.
            for f in sorted(comparison.flips, key=lambda f: f.near_tie)[:_SHOWN]
        ]
        yield _table(
            f"flips ({len(comparison.flips)}): tokens that take another class",
            ("layer", "row", "column", "class", "margin", "explained up to", "kind"),
            flip_rows,
        )


def _table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.width = _WIDTH
    table.padding = (0, 0)
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _drift(stages: list[Stage]) -> str:
    """The worst of some stages, marked where one is beyond what is accepted."""
    if not stages:
        return "-"
    drifts = [stage.drift for stage in stages if stage.drift is not None]
    worst = f"{max(drifts):.1e}" if drifts else "-"
    return worst + "!" if any(stage.parts for stage in stages) else worst


def _notes(comparison: Comparison) -> Iterable[str]:
    """What the tables do not show, a line each."""
    if comparison.followed:
        yield f"{comparison.followed} more choices differ in consequence of flips"
    lists: dict[str, Any] = {
        "not in the other trace": comparison.missing,
        "only in the other trace": comparison.extra,
        "not compared, as flips left no token": comparison.uncompared,
        "configurations differ in": comparison.config_differences,
    }
    for what, names in lists.items():
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            yield f"{what}: {', '.join(names[:_SHOWN])}{more}"


def _sentence(comparison: Comparison, other: str, reference: str) -> str:
    """The result, in one sentence."""
    first = comparison.first
    if first is None:
        near = len(comparison.flips)
        ties = f", {near} near tie{'s' * (near != 1)} apart" if near else ""
        return (
            f"{other} agrees with {reference} in all {len(comparison.stages)} stages that both "
            f"have, to {comparison.tolerance:.1e}{ties}."
        )
    where = "" if first.row is None else f" (row {first.row}, column {first.column})"
    why = first.problem or f"drift {first.drift:.1e}, more than {comparison.tolerance:.1e}"
    return f"{other} parts from {reference} first at {first.name}{where}: {why}."
