"""`openzaya data VERB ...`: find the verb among those that prepare data, each in its own module."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from types import ModuleType

HELP = "prepare data: trim chats, tokenise beforehand, look into shards, verify them"

VERBS = ("trim", "build", "inspect", "verify")

_EPILOG = """\
examples:
  openzaya data trim --path chats.jsonl --tokenizer CHECKPOINT --context 4K 32K --out trimmed
  openzaya data build --kind jsonl --path corpus --tokenizer tokenizer.json --out shards
  openzaya data inspect shards
  openzaya data verify shards

A recipe trains on a folder of shards with a source of kind = "shards", path = "shards".
"""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments behind `data`."""
    if not argv or argv[0] not in VERBS:
        parser = argparse.ArgumentParser(
            prog="openzaya data",
            description=HELP,
            epilog=_EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        verbs = parser.add_subparsers(metavar="VERB", required=True)
        for name in VERBS:
            verbs.add_parser(name, help=_module(name).HELP)
        return parser.parse_args(argv)
    module = _module(argv[0])
    verb = argparse.ArgumentParser(prog=f"openzaya data {argv[0]}", description=module.HELP)
    module.add_arguments(verb)
    verb.set_defaults(run=module.run)
    return verb.parse_intermixed_args(argv[1:])


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"openzaya.cli.data_{name}")
