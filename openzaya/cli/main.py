"""`openzaya VERB ...`: find the verb, run it, turn errors into one message."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import openzaya
from openzaya.errors import UserError

VERBS = (
    "demo",
    "train",
    "data",
    "generate",
    "chat",
    "inspect",
    "convert",
    "merge",
    "verify",
    "trace",
    "ablate",
)

EXIT_BAD_INPUT = 2

_EPILOG = """\
start here:
  openzaya demo                      train a small model in front of you, then talk to it
  openzaya inspect zaya1-8b          what the full-size model costs
  openzaya VERB --help               options and examples of a verb
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser that lists all verbs; `_parse` reads the arguments of one."""
    parser = argparse.ArgumentParser(
        prog="openzaya",
        description=openzaya.__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"openzaya {openzaya.__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name in VERBS:
        module = importlib.import_module(f"openzaya.cli.{name}")
        verbs.add_parser(name, help=module.HELP)
    return parser


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a verb's arguments with options and positionals in any order.

    Sub-parsers cannot do that, so a verb gets a parser of its own.
    """
    if not argv or argv[0] not in VERBS:
        return build_parser().parse_args(argv)
    module = importlib.import_module(f"openzaya.cli.{argv[0]}")
    if hasattr(module, "parse"):  # a verb that has verbs of its own
        args: argparse.Namespace = module.parse(argv[1:])
        return args
    verb = argparse.ArgumentParser(prog=f"openzaya {argv[0]}", description=module.HELP)
    module.add_arguments(verb)
    verb.set_defaults(run=module.run)
    return verb.parse_intermixed_args(argv[1:])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0, 2 for bad input (as argparse does), 128 + signal when interrupted.
    """
    args = _parse(sys.argv[1:] if argv is None else argv)
    try:
        code: int = args.run(args)
        return code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except BrokenPipeError:  # the reader of our output has left
        sys.stderr.close()
        return 141
    except OSError as error:  # a full disk, a folder that cannot be written: the system says it
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
