"""`openzaya verify`: is a checkpoint whole, and are two the same model?"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openzaya.cli.units import count
from openzaya.errors import UserError

if TYPE_CHECKING:
    from openzaya.checkpoint.compare import Opened, Verification

HELP = "prove that a checkpoint is whole, or that two are the same model"

_EPILOG = """\
examples:
  openzaya verify ZAYA1-8B                     all tensors there, finite, as in the manifest
  openzaya verify ZAYA1-8B-legacy ZAYA1-8B     bit by bit in any dialects, then fp32 logits
  openzaya verify ZAYA1-8B copy --no-logits    without running the models
  openzaya verify ZAYA1-8B --trace FILE        against a golden trace (see openzaya trace)

exit code: 0 when all is well, 1 when something differs, 2 when a checkpoint is damaged
"""

_SHOWN = 12
"""Tensors that are listed one by one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("first", metavar="A", help="a model folder, training run or hub id")
    parser.add_argument("second", metavar="B", nargs="?", help="another one to compare with")
    parser.add_argument("--trace", metavar="FILE", help="compare with a trace; golden: the bundled")
    parser.add_argument("--no-logits", action="store_true", help="compare tensors alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Run the verb."""
    from openzaya.checkpoint.compare import check_data, open_for_reading
    from openzaya.checkpoint.run import find_checkpoint
    from openzaya.cli.progress import bytes_progress

    if args.trace not in (None, "golden") and not Path(args.trace).is_file():
        raise UserError(f"--trace {args.trace}: no such file")
    names = [name for name in (args.first, args.second) if name is not None]
    opened = [open_for_reading(find_checkpoint(name, whole=True)) for name in names]
    fields: dict[str, Any] = {"checkpoints": [_facts(one) for one in opened]}
    result = None
    if len(opened) == 2:
        result = _compare(opened[0], opened[1], not args.no_logits)
        fields |= result.to_json()
    else:
        with bytes_progress("reading", opened[0].nbytes) as progress:
            check_data(opened[0], progress)
    traces = [_trace(one, args.trace) for one in opened] if args.trace else []
    fields["traces"] = traces
    good = (result is None or result.equal) and all(trace["agrees"] for trace in traces)
    fields["equal" if result else "whole"] = result.equal if result else True
    if args.json:
        print(json.dumps(fields, indent=2))
    else:
        _print(fields, result)
    return 0 if good else 1


def _facts(opened: Opened) -> dict[str, Any]:
    from openzaya.checkpoint.tensors import parameter_count, tensor_count

    described = opened.described
    return {
        "path": str(opened.folder),
        "dialect": described.dialect,
        "tensors": tensor_count(described.model, described.layout),
        "parameters": parameter_count(described.model),
        "bytes": opened.nbytes,
        "checksums": sum(part.crc is not None for _, parts in opened.fitted for part in parts),
    }


def _compare(a: Opened, b: Opened, logits: bool) -> Verification:
    from openzaya.checkpoint.compare import compare, compare_logits
    from openzaya.cli.progress import bytes_progress

    with bytes_progress("comparing", a.nbytes) as progress:
        result = compare(a, b, progress)
    if logits:
        result.logits = compare_logits(a.folder, b.folder)
        if result.logits is None:
            result.settings.append("the probe: vocabularies or windows, so logits do not compare")
    return result


def _trace(opened: Opened, file: str) -> dict[str, Any]:
    from openzaya.checkpoint.load import load_model
    from openzaya.checkpoint.trace_compare import compare
    from openzaya.checkpoint.trace_file import GOLDEN_TRACE, make_trace, read_trace

    reference = read_trace(GOLDEN_TRACE if file == "golden" else Path(file))
    model = load_model(opened.folder, matrices="stored")
    comparison = compare(reference, make_trace(model, reference.probe))
    first = comparison.first
    return {
        "checkpoint": str(opened.folder),
        "agrees": comparison.agrees,
        "first": None if first is None else first.name,
        "problem": None if first is None else first.problem or f"drift {first.drift:.1e}",
        "flips": len(comparison.flips),
    }


def _print(fields: dict[str, Any], result: Verification | None) -> None:
    for one in fields["checkpoints"]:
        checks = f", {one['checksums']:,} checksums match" if one["checksums"] else ""
        print(
            f"{one['path']}: dialect {one['dialect']}, {one['tensors']:,} tensors, "
            f"{count(one['parameters'])} parameters; all there and finite{checks}"
        )
    if result is not None:
        for line in result.settings:
            print(f"config differs in {line}")
        for different in result.different[:_SHOWN]:
            print(f"{different.name}: {different.how}")
        if len(result.different) > _SHOWN:
            print(f"and {len(result.different) - _SHOWN} more tensors")
        print(f"{result.same:,} of {result.tensors:,} logical tensors are equal bit by bit")
        if result.logits is not None:
            unequal, largest = result.logits
            print(
                "fp32 logits of the probe are equal bit by bit"
                if not unequal
                else f"{unequal:,} fp32 logits of the probe differ, by {largest:.2e} at most"
            )
    for trace in fields["traces"]:
        verdict = (
            "agrees with the trace"
            if trace["agrees"]
            else f"parts from the trace first at {trace['first']}: {trace['problem']}"
        )
        print(f"{trace['checkpoint']} {verdict}")
    if result is not None:
        print("the same model" if result.equal else "NOT the same model")
