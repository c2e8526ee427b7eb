"""`openzaya data trim`: chats that fit a context, every one with its answer."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from openzaya.cli.tokenizer import load_tokenizer
from openzaya.cli.units import count
from openzaya.errors import UserError

if TYPE_CHECKING:
    from openzaya.data.trimming import Counts

HELP = "cut the reasoning of chats until they fit a context, never an answer"

_EPILOG = """\
examples:
  openzaya data trim --path chats.jsonl --tokenizer CHECKPOINT --context 4K --out trimmed
  openzaya data trim --path chats/ --tokenizer CHECKPOINT --context 4K 32K 128K --out trimmed

FOLDER gets one file for each context, 4096.jsonl and so on, always cut from the full text.
A chat that fits is left alone. Else the last assistant's reasoning loses its tail until the chat
fills the context exactly; if that is not enough, the reasoning of earlier turns goes; if the
answers alone are too long, the chat is dropped. What comes out is trained on with a source of
kind = "chat", which packs whole chats (best-fit decreasing).
"""

_MOST = 1 << 27


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument(
        "--path", required=True, help="of chats: a file, folder or glob of .jsonl or .parquet"
    )
    parser.add_argument(
        "--tokenizer", metavar="PATH", required=True, help="a checkpoint, or a tokenizer.json"
    )
    parser.add_argument(
        "--context", nargs="+", required=True, metavar="N", help="tokens of each stage: 4096, 32K"
    )
    parser.add_argument("--out", metavar="FOLDER", type=Path, required=True, help="of the results")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one a core)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Run the verb."""
    from openzaya.checkpoint.atomic import atomic_folder
    from openzaya.cli.progress import bytes_progress
    from openzaya.config.recipe import SourceConfig
    from openzaya.data.conversations import ChatEncoder
    from openzaya.data.sources import Corpus
    from openzaya.data.template import read_template
    from openzaya.data.trimming import as_table, trim_corpus

    contexts = [_tokens(text) for text in args.context]
    if len(set(contexts)) < len(contexts):
        raise UserError(f"--context names a length twice: {' '.join(args.context)}")
    workers = len(os.sched_getaffinity(0)) if args.workers is None else args.workers
    if not 1 <= workers <= 1024:
        raise UserError(f"--workers is {workers:,}; it must be from 1 to 1,024")
    if args.out.exists():
        raise UserError(f"{args.out} exists already: name another folder, or remove it")
    corpus = Corpus(SourceConfig(kind="chat", path=args.path), "chat")
    corpus.check()
    tokenizer, beside = load_tokenizer(args.tokenizer)
    chat = ChatEncoder(tokenizer, read_template(beside, tokenizer))
    began = time.monotonic()
    with (
        bytes_progress("trimming", corpus.nbytes()) as progress,
        atomic_folder(args.out.absolute()) as folder,
    ):
        counts = trim_corpus(corpus, chat, contexts, folder, workers, progress)
    seconds = time.monotonic() - began
    if args.json:
        fields = {"folder": str(args.out), "contexts": as_table(counts)}
        print(json.dumps({**fields, "seconds": round(seconds, 2), "workers": workers}, indent=2))
        return 0
    _print(counts)
    read = counts[0].tokens_before
    print(f"{args.out}: {seconds:.1f} s with {workers} worker(s), {count(read / seconds)} tokens/s")
    return 0


def _print(counts: list[Counts]) -> None:
    print(f"{'context':>8}  {'whole':>9} {'cut':>9} {'earlier':>9} {'dropped':>9}  tokens kept")
    for row in counts:
        share = row.tokens_after / max(row.tokens_before, 1)
        print(
            f"{row.context:>8,}  {row.whole:>9,} {row.cut:>9,} {row.earlier:>9,} "
            f"{row.dropped:>9,}  {count(row.tokens_after)} of {count(row.tokens_before)} "
            f"({share:.1%})"
        )
    print("cut: the tail of the last reasoning; earlier: reasoning of earlier turns removed")


def _tokens(text: str) -> int:
    """4096, or 4K."""
    scale = 1024 if text[-1:].upper() == "K" else 1
    digits = text[:-1] if scale > 1 else text
    if not digits.isdecimal() or not 1 <= int(digits) * scale <= _MOST:
        raise UserError(f"--context {text!r} is no number of tokens: write 4096, or 4K")
    return int(digits) * scale
