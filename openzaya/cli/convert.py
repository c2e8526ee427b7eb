"""`openzaya convert`: the same weights in another dialect."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openzaya.cli.units import count, decimal
from openzaya.errors import UserError

if TYPE_CHECKING:
    from openzaya.checkpoint.plan import Plan

HELP = "write a checkpoint in another dialect, in small memory"

_EPILOG = """\
examples:
  openzaya convert ZAYA1-8B-legacy ZAYA1-8B --to C
  openzaya convert Zyphra/ZAYA1-8B@REVISION old --to B --shard-size 2GB
  openzaya convert base tuned --to C --adapter lora      merge a LoRA adapter

dialects: A  base era (per-layer lists)    B  legacy with scalars
          C  native, what transformers reads
No number changes; names do, and experts are stacked or taken apart. Every tensor is accounted for.
An interrupted conversion leaves nothing that opens; the same command goes on where it stopped.
"""

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("source", metavar="SRC", help="a model folder, training run or hub id")
    parser.add_argument("target", metavar="DST", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--to", required=True, metavar="A|B|C", help="dialect of the result")
    add_shard_size(parser)
    parser.add_argument(
        "--adapter", type=Path, metavar="DIR", help="merge this LoRA adapter (PEFT format)"
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="write even where readers of the dialect take the skip class for something else",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def add_shard_size(parser: argparse.ArgumentParser) -> None:
    """The option that says how large a file gets; `byte_count` reads it."""
    parser.add_argument(
        "--shard-size", default="5GB", metavar="SIZE", help="size of one file (default: 5GB)"
    )


def run(args: argparse.Namespace) -> int:
    """Run the verb."""
    from openzaya.checkpoint.dialects import parse_dialect
    from openzaya.checkpoint.plan import plan_conversion
    from openzaya.checkpoint.run import find_adapter, find_checkpoint

    dialect, size = parse_dialect(args.to), byte_count(args.shard_size)
    source = find_checkpoint(args.source)
    adapter = None if args.adapter is None else find_adapter(args.adapter)
    plan = plan_conversion(source, args.target, dialect, size, args.force, adapter)
    return carry_out(plan, f"to dialect {dialect}", args.json)


def carry_out(plan: Plan, what: str, as_json: bool) -> int:
    """Convert, with a progress bar that says what, and report."""
    from openzaya.checkpoint.convert import convert
    from openzaya.cli.progress import bytes_progress

    began = time.monotonic()
    try:
        with bytes_progress(what, plan.nbytes) as progress:
            kept = convert(plan, progress)
    except KeyboardInterrupt:
        print("stopped; the same command goes on where this one stopped", file=sys.stderr)
        raise
    seconds = time.monotonic() - began
    fields = _fields(plan, kept, seconds)
    if as_json:
        print(json.dumps(fields, indent=2))
    else:
        _print(fields, plan)
    return 0


def _fields(plan: Plan, kept: int, seconds: float) -> dict[str, Any]:
    from openzaya.checkpoint.tensors import parameter_count, tensor_count

    return {
        "source": str(plan.source),
        "target": str(plan.target),
        "from": plan.described.dialect,
        "to": plan.dialect,
        "source_tensors": tensor_count(plan.described.model, plan.described.layout),
        "target_tensors": tensor_count(plan.described.model, plan.layout),
        "parameters": parameter_count(plan.described.model),
        "bytes": plan.nbytes,
        "files": len(plan.shards),
        "kept_bytes": kept,
        "seconds": round(seconds, 2),
        "bytes_per_second": round((plan.nbytes - kept) / max(seconds, 1e-9)),
        "merged": sorted(plan.edits),
        "notes": plan.notes,
        "left_out": plan.companions.left_out,
    }


def _print(fields: dict[str, Any], plan: Plan) -> None:
    print(
        f"{fields['source_tensors']:,} tensors of dialect {fields['from']} are now "
        f"{fields['target_tensors']:,} of dialect {fields['to']}: "
        f"{count(fields['parameters'])} parameters,\n"
        f"{decimal(fields['bytes'])} in {fields['files']} file(s), {fields['seconds']:.1f} s, "
        f"{decimal(fields['bytes_per_second'])}/s"
        + (f", {decimal(fields['kept_bytes'])} taken over" if fields["kept_bytes"] else "")
    )
    for note in fields["notes"]:
        print(f"note: {note}")
    if fields["merged"]:
        print(f"merged the adapter into {len(fields['merged'])} tensors")
    if fields["left_out"]:
        print(f"not carried along: {', '.join(fields['left_out'])}")
    print(f"finished: {plan.target}")


def byte_count(text: str) -> int:
    """The bytes that a size such as 5GB means.

    Raises:
        UserError: if it is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or not 1 <= float(match[1]) * unit < 1e18:
        raise UserError(f"--shard-size is {text!r}; give a size such as 5GB, 500MB or 2GiB")
    return int(float(match[1]) * unit)
