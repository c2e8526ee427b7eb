"""`openzaya demo`: the whole way from noise to a conversation."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

HELP = "train a small model in front of you, examine it, and talk to it"

_EPILOG = """\
examples:
  openzaya demo                  about ten minutes on two cores, then a chat
  openzaya demo --minutes 5      a smaller budget, and a weaker model
  openzaya demo --no-chat        for scripts

Ctrl-C saves; the same command continues where it was and repeats nothing that is finished. To start
afresh remove the run's folder: runs/demo, or runs/demo-5-minutes for another budget.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument(
        "--minutes", type=float, metavar="N", help="time for everything (default: 10)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs"), help="folder of runs (default: runs)"
    )
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="recipe fields to change")
    parser.add_argument("--no-chat", action="store_true", help="end after the report")


def run(args: argparse.Namespace) -> int:
    """Run the verb."""
    from openzaya.errors import UserError

    if args.minutes is not None and not 0.2 <= args.minutes <= 24 * 60:
        raise UserError(f"--minutes {args.minutes:g} is out of range; give 0.2 to 1440.")
    from rich.console import Console

    from openzaya.demo.demo import DEFAULT_MINUTES, run_demo
    from openzaya.train.stop import Stopped

    console = Console()
    try:
        folder = run_demo(args.minutes or DEFAULT_MINUTES, args.out, console, args.overrides)
    except Stopped as stopped:
        return stopped.exit_code
    command = f"openzaya chat {shlex.quote(str(folder))}"
    if args.no_chat or not sys.stdin.isatty():
        print(f"Talk to it: {command}")
        return 0
    from openzaya.cli import chat

    print(f"Now talk to it (again later: {command}).")
    parser = argparse.ArgumentParser(prog="openzaya chat")
    chat.add_arguments(parser)
    return chat.run(parser.parse_args([str(folder)]))
