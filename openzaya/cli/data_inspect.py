"""`openzaya data inspect`: what a folder of shards holds."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openzaya.cli.units import count, decimal

if TYPE_CHECKING:
    from openzaya.data.shards import Manifest

HELP = "shards, documents, tokens, tokenizer and a sample of a folder"

_EPILOG = """\
examples:
  openzaya data inspect shards
  openzaya data inspect shards --json | jq .tokens.train
"""

_SAMPLE_TOKENS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="what `data build` made")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Run the verb."""
    from openzaya.data.shards import read_manifest

    fields = facts(args.folder, read_manifest(args.folder))
    if args.json:
        print(json.dumps(fields, indent=2))
    else:
        print_facts(fields)
        print(f"it begins: {fields['sample']!r}")
    return 0


def facts(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """What there is to say of a folder."""
    from openzaya.data.shards import open_shards, stored_tokenizer
    from openzaya.data.split import SIDES

    store = open_shards(folder, manifest)
    side = store.train if len(store.train) else store.heldout
    first = side.document(0)[:_SAMPLE_TOKENS].tolist()
    tokens = {side: manifest.tokens(side) for side in SIDES}
    return {
        "folder": str(folder),
        "digest": manifest.digest,
        "shards": len(manifest.shards),
        "shard_tokens": manifest.shard_tokens,
        "documents": {side: manifest.documents(side) for side in SIDES},
        "tokens": tokens,
        "dtype": manifest.dtype,
        "masked": manifest.masked,
        "bytes": sum(shard.nbytes for shard in manifest.shards),
        "text_bytes": manifest.text_bytes,
        "bytes_per_token": round(manifest.text_bytes / sum(tokens.values()), 3),
        "tokenizer": manifest.tokenizer,
        "vocab_size": manifest.vocab_size,
        "heldout": manifest.heldout,
        "source": dict(manifest.source),
        "sample": stored_tokenizer(folder).decode(first, skip_special=False),
    }


def print_facts(fields: dict[str, Any]) -> None:
    """The same as a table of 78 columns."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    documents, tokens = fields["documents"], fields["tokens"]
    origin = ", ".join(f"{key} {value!r}" for key, value in fields["source"].items())
    mask = ", with a loss mask" if fields["masked"] else ""
    rows = (
        ("shards", f"{fields['shards']:,} of at most {count(fields['shard_tokens'])} tokens{mask}"),
        ("documents", f"{documents['train']:,} to train on, {documents['heldout']:,} held out"),
        ("tokens", f"{tokens['train']:,} to train on, {tokens['heldout']:,} held out"),
        ("held-out share", f"{fields['heldout']:g} of the documents"),
        ("on the disk", f"{decimal(fields['bytes'])}, {fields['dtype']}"),
        ("text", f"{decimal(fields['text_bytes'])}, {fields['bytes_per_token']} bytes a token"),
        ("tokenizer", f"{fields['vocab_size']:,} entries, {fields['tokenizer'][:12]}"),
        ("source", origin),
        ("digest", fields["digest"]),
    )
    table = Table(
        title=fields["folder"],
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_header=False,
    )
    table.width = 78
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, soft_wrap=True, markup=False).print(table)
