"""`openzaya train`: run a recipe, or continue it."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openzaya.model.config import ModelConfig

HELP = "train a recipe from scratch, or continue where it stopped"

_EPILOG = """\
examples:
  openzaya train tiny                          a recipe that comes with the project
  openzaya train my.toml name=second seed=1    change fields; each run needs its own name
  openzaya train tiny phases.text.lr=1e-3      phases go by their names
  openzaya train my.toml start_from=ZAYA1-8B   go on from a checkpoint, in any dialect
  openzaya train sft sources.mine.path=my.jsonl    learn from chats (rows with `messages`)
  openzaya train lora start_from=ZAYA1-8B      train an adapter of it, in PEFT's format
  openzaya train tiny --print                  the resolved recipe, every default spelled out

Ctrl-C or SIGTERM saves first; the same command continues. A run lives in OUT/NAME: checkpoints
(open them with `openzaya generate` or with transformers), metrics.jsonl, tensorboard/.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("recipe", metavar="RECIPE", help="a TOML file, or a name in recipes/")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="fields to change")
    parser.add_argument(
        "--out", type=Path, default=Path("runs"), help="folder of runs (default: runs)"
    )
    parser.add_argument(
        "--print", action="store_true", help="print the resolved recipe and do nothing"
    )


def run(args: argparse.Namespace) -> int:
    """Run the verb."""
    from openzaya.config.load import load_recipe, recipe_to_toml

    def architecture(start_from: str, name: str) -> ModelConfig:
        from openzaya.train.setup import architecture_of  # slow to import, and seldom needed

        return architecture_of(start_from, args.out / name)

    recipe = load_recipe(args.recipe, args.overrides, architecture)
    if args.print:
        sys.stdout.write(recipe_to_toml(recipe))
        return 0
    from rich.console import Console

    from openzaya.train.stop import Stopped
    from openzaya.train.trainer import train

    console = Console()
    try:
        final = train(recipe, args.out, console)
    except Stopped as stopped:
        return stopped.exit_code
    print(f"finished: {final}")
    if recipe.adapter is not None:
        base, adapter = shlex.quote(str(recipe.start_from)), shlex.quote(str(final))
        print(f"try it:   openzaya chat {base} --adapter {adapter}")
        print(f"merge it: openzaya merge {base} --adapter {adapter} -o merged")
        return 0
    print(f"try it:   openzaya generate {shlex.quote(str(final))} 'Once'")
    return 0
