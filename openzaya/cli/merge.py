"""`openzaya merge`: a checkpoint with an adapter added into its weights."""

from __future__ import annotations

import argparse
from pathlib import Path

from openzaya.cli.convert import add_shard_size, byte_count, carry_out
from openzaya.cli.generate import CHECKPOINT_HELP

HELP = "add a LoRA or DoRA adapter into a checkpoint's weights"

_EPILOG = """\
examples:
  openzaya merge runs/tiny --adapter runs/lora -o tuned
  openzaya merge ZAYA1-8B --adapter lora -o ZAYA1-8B-tuned

The result is a whole checkpoint in the dialect of the source; tokenizer and chat template go along.
It computes what the source computes with --adapter, and every token costs less. Sums are made in
fp32 and rounded to the dtype of the source's weights.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT_HELP)
    parser.add_argument(
        "--adapter",
        type=Path,
        required=True,
        metavar="DIR",
        help="an adapter (PEFT format), or a run that trained one",
    )
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        required=True,
        metavar="OUT",
        help="a folder that does not exist yet",
    )
    add_shard_size(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Run the verb."""
    from openzaya.checkpoint.dialects import describe_folder
    from openzaya.checkpoint.plan import plan_conversion
    from openzaya.checkpoint.run import find_adapter, find_checkpoint

    size = byte_count(args.shard_size)
    source = find_checkpoint(args.checkpoint)
    dialect = describe_folder(source).dialect
    adapter = find_adapter(args.adapter)
    plan = plan_conversion(source, args.out, dialect, size, adapter=adapter)
    return carry_out(plan, "merging", args.json)
