"""`openzaya data build`: a corpus, tokenised once and for all."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openzaya.cli.tokenizer import load_tokenizer
from openzaya.cli.units import count, decimal
from openzaya.errors import UserError

if TYPE_CHECKING:
    from openzaya.config.recipe import Recipe, SourceConfig
    from openzaya.data.shard_build import Done
    from openzaya.data.tokenizer import Tokenizer

HELP = "tokenise a corpus into shards, in parallel"

_KINDS = ("text", "jsonl", "parquet", "hub", "bundled", "stdlib", "chat")

_EPILOG = """\
examples:
  openzaya data build --kind jsonl --path corpus/ --field body \\
      --tokenizer tokenizer.json --out shards
  openzaya data build --kind text --path books.txt --separator '\\n\\n\\n' \\
      --train-tokenizer 32768 --out shards
  openzaya data build --kind chat --path chats.jsonl --tokenizer CHECKPOINT \
      --out shards/chats
  openzaya data build --recipe my.toml --source web --out shards/web

FOLDER appears when it is whole. A build that was killed goes on with the same command, after its
last complete shard. The same corpus gives the same bytes, however many workers there are.
Chats are rows with `messages` (and `tools`); they are shown as the chat template beside the
tokenizer shows them, or in our own format, and shards keep which tokens are to be learned.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("--out", metavar="FOLDER", type=Path, required=True, help="of the shards")
    corpus = parser.add_argument_group("the corpus (the fields of a recipe's source)")
    corpus.add_argument("--kind", choices=_KINDS, help="what it is")
    corpus.add_argument("--path", help="file, folder or glob; hub: the data set's name")
    corpus.add_argument("--field", help="column of jsonl, parquet and hub rows (default: text)")
    corpus.add_argument("--split", help="split of a hub data set (default: train)")
    corpus.add_argument("--revision", help="pinned revision of a hub data set")
    corpus.add_argument("--separator", help="cuts text files into documents; \\n is a line end")
    corpus.add_argument(
        "--loss-on", metavar="ROLES", help="chat: whose tokens are learned (default: assistant)"
    )
    corpus.add_argument("--heldout", type=float, metavar="SHARE", help="kept for evaluation (0.02)")
    corpus.add_argument("--recipe", metavar="R", help="take the source from this recipe")
    corpus.add_argument("--source", metavar="NAME", help="the source's name in it")
    tokens = parser.add_argument_group("the tokenizer (of --recipe, if it is not given)")
    tokens.add_argument("--tokenizer", metavar="PATH", help="a tokenizer.json, or a checkpoint")
    tokens.add_argument(
        "--train-tokenizer", type=int, metavar="N", help="train one with N entries on the corpus"
    )
    how = parser.add_argument_group("how")
    how.add_argument("--workers", type=int, metavar="N", help="processes (default: one a core)")
    how.add_argument(
        "--shard-tokens", type=int, metavar="N", help="tokens of a shard at most (default: 2^27)"
    )
    how.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Run the verb."""
    from openzaya.cli.data_inspect import facts, print_facts
    from openzaya.data.conversations import ChatEncoder
    from openzaya.data.shard_build import SHARD_TOKENS, build_shards, check_room, estimate
    from openzaya.data.sources import Corpus
    from openzaya.data.template import read_template
    from openzaya.train.chat_check import check_tool_calls

    workers = len(os.sched_getaffinity(0)) if args.workers is None else args.workers
    shard_tokens = SHARD_TOKENS if args.shard_tokens is None else args.shard_tokens
    for option, value, most in (
        ("--workers", workers, 1024),
        ("--shard-tokens", shard_tokens, 1 << 34),
    ):
        if not 1 <= value <= most:
            raise UserError(f"{option} is {value:,}; it must be from 1 to {most:,}")
    recipe, name, source = _source(args)
    corpus = Corpus(source, name)
    corpus.check()
    tokenizer, folder = _tokenizer(args, recipe, name, source)
    template = None if folder is None else read_template(folder, tokenizer)
    chat = ChatEncoder(tokenizer, template, check_tool_calls)
    expected = estimate(corpus, tokenizer)
    out = args.out.absolute()
    if not out.exists():
        check_room(expected, out)
    began = time.monotonic()
    watch = _Watch()
    try:
        with _progress(expected.corpus_bytes, watch) as progress:
            manifest = build_shards(
                out, source, name, chat, shard_tokens, workers, progress=progress
            )
    except KeyboardInterrupt:
        print("stopped; the same command goes on after the last whole shard", file=sys.stderr)
        raise
    except OSError as error:
        raise UserError(
            f"{args.out} is not finished: {error}. Put that right (is the disk full?); the same "
            "command goes on after the last whole shard"
        ) from error
    seconds = time.monotonic() - began
    fields = {**facts(args.out, manifest), **watch.rates(seconds, workers)}
    if args.json:
        print(json.dumps(fields, indent=2))
        return 0
    print_facts(fields)
    if not watch.new_tokens:
        print("nothing to do: it was whole already")
    else:
        kept = f"; {count(watch.kept_tokens)} tokens were there" if watch.kept_tokens else ""
        print(
            f"{seconds:.1f} s with {workers} worker(s): {count(fields['tokens_per_second'])} "
            f"tokens/s, {decimal(fields['bytes_per_second'])}/s of text{kept}"
        )
    print(f'in a recipe: kind = "shards", path = {json.dumps(str(args.out))}')
    return 0


class _Watch:
    """What this build did itself, and what it found done."""

    def __init__(self) -> None:
        self.first: Done | None = None
        self.last: Done | None = None

    def __call__(self, done: Done) -> None:
        self.first, self.last = self.first or done, done

    @property
    def kept_tokens(self) -> int:
        return 0 if self.first is None else self.first.tokens

    @property
    def new_tokens(self) -> int:
        return 0 if self.last is None else self.last.tokens - self.kept_tokens

    def rates(self, seconds: float, workers: int) -> dict[str, Any]:
        """Fields for the report."""
        first, last = self.first, self.last
        text = 0 if first is None or last is None else last.text_bytes - first.text_bytes
        return {
            "seconds": round(seconds, 2),
            "workers": workers,
            "kept_tokens": self.kept_tokens,
            "new_tokens": self.new_tokens,
            "tokens_per_second": round(self.new_tokens / max(seconds, 1e-9)),
            "bytes_per_second": round(text / max(seconds, 1e-9)),
        }


@contextmanager
def _progress(total: int, watch: _Watch) -> Iterator[Callable[[Done], None]]:
    """A bar on stderr: documents, tokens and text a second, and time left."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (BarColumn(bar_width=None), TextColumn("{task.description}"), TimeRemainingColumn())
    began = time.monotonic()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=total)

        def report(done: Done) -> None:
            watch(done)
            rates = watch.rates(time.monotonic() - began, 0)
            bar.update(
                task,
                completed=done.read_bytes,
                description=f"{count(done.documents)} docs  "
                f"{count(rates['tokens_per_second'])} tokens/s  "
                f"{decimal(rates['bytes_per_second'])}/s",
            )

        yield report


def _source(args: argparse.Namespace) -> tuple[Recipe | None, str, SourceConfig]:
    """The recipe, if there is one, and the source with its name."""
    from pydantic import ValidationError

    from openzaya.config.load import load_recipe
    from openzaya.config.recipe import SourceConfig

    names = ("kind", "path", "field", "split", "revision", "separator", "heldout")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.loss_on is not None:
        given["loss_on"] = args.loss_on.split(",")
    if "separator" in given:
        given["separator"] = given["separator"].replace("\\n", "\n").replace("\\t", "\t")
    recipe = None
    if args.recipe is not None:
        recipe = load_recipe(args.recipe)
        if args.source not in recipe.sources:
            raise UserError(
                f"--source {args.source!r}: the recipe has {', '.join(recipe.sources)}; name one"
            )
        given = {**recipe.sources[args.source].model_dump(exclude_unset=True), **given}
    elif args.source is not None:
        raise UserError("--source names a source of a recipe: give --recipe too")
    if given.get("kind") not in _KINDS:
        raise UserError(
            f"a source of kind {given.get('kind')!r} cannot be tokenised: give --kind (one of "
            f"{', '.join(_KINDS)}) with --path, or --recipe with --source"
        )
    try:
        return recipe, args.source or given["kind"], SourceConfig(**given)
    except ValidationError as error:
        problems = (p["msg"].removeprefix("Value error, ") for p in error.errors())
        raise UserError(f"the corpus is not described well: {'; '.join(problems)}") from error


def _tokenizer(
    args: argparse.Namespace, recipe: Recipe | None, name: str, source: SourceConfig
) -> tuple[Tokenizer, Path | None]:
    """What the options ask for; without any, what the recipe asks for. And the folder it is in."""
    from openzaya.config.recipe import TokenizerConfig
    from openzaya.data.vocabulary import obtain_tokenizer

    if args.tokenizer is not None and args.train_tokenizer is not None:
        raise UserError("--tokenizer and --train-tokenizer exclude each other: give one")
    if args.tokenizer is not None:
        return load_tokenizer(args.tokenizer)
    if args.train_tokenizer is not None:
        if args.train_tokenizer <= 256:
            raise UserError(f"--train-tokenizer is {args.train_tokenizer}; 256 bytes need more")
        config = TokenizerConfig(vocab_size=args.train_tokenizer)
        return obtain_tokenizer(config, {name: source}), None
    if recipe is None:
        raise UserError("which tokenizer? Give --tokenizer PATH, or --train-tokenizer N")
    if recipe.start_from is not None and recipe.tokenizer.path is None:
        return load_tokenizer(recipe.start_from)
    return obtain_tokenizer(recipe.tokenizer, recipe.sources), None
