"""The tokenizer that a recipe asks for: read from its file, that of its shards, or trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from openzaya.config.recipe import SourceConfig, TokenizerConfig
from openzaya.data import tasks
from openzaya.data.shards import read_manifest, stored_tokenizer
from openzaya.data.sources import documents
from openzaya.data.split import is_heldout
from openzaya.data.tokenizer import Tokenizer
from openzaya.errors import UserError

# Generated tasks say the same few words again and again: more of them teach a vocabulary nothing.
TASK_BYTES = 500_000


def obtain_tokenizer(config: TokenizerConfig, sources: Mapping[str, SourceConfig]) -> Tokenizer:
    """Loads `config.path`, or what the sources' shards were made with, or else trains one.

    Training reads an equal share of `sample_bytes` from every source.

    Raises:
        UserError: if a source cannot be read, or shards were made with different tokenizers.
    """
    if config.path is not None:
        return Tokenizer.load(config.path)
    folders = {n: Path(str(s.path)).expanduser() for n, s in sources.items() if s.kind == "shards"}
    if folders:
        return _common(folders)
    return Tokenizer.train(sample(sources, config.sample_bytes), config.vocab_size)


def _common(folders: Mapping[str, Path]) -> Tokenizer:
    """The one tokenizer that all shards were made with."""
    digests = {name: read_manifest(folder).tokenizer for name, folder in folders.items()}
    first, *others = digests
    for other in others:
        if digests[other] != digests[first]:
            raise UserError(
                f"the shards of sources {first!r} and {other!r} were made with different "
                "tokenizers: build one of them again with the other's tokenizer.json"
            )
    return stored_tokenizer(folders[first])


def sample(sources: Mapping[str, SourceConfig], total_bytes: int) -> Iterator[str]:
    """The first documents of every source, in turn, held-out ones left out."""
    share = total_bytes // max(1, len(sources))
    for name, source in sources.items():
        left = share
        for text in _texts(source, name):
            if left <= 0:
                break
            piece = text[:left]  # one huge document must not take more than its share
            left -= len(piece.encode("utf-8", "replace"))
            yield piece


def _texts(source: SourceConfig, name: str) -> Iterator[str]:
    if source.kind != "tasks":
        for index, text in enumerate(documents(source, name)):
            if not is_heldout(index, text, source.heldout, source.heldout_from == "end"):
                yield text
        return
    size = index = 0
    kinds = tasks.select(source.tasks, name)
    while size < TASK_BYTES:
        task = tasks.make(kinds[index % len(kinds)], 0, index, heldout=False)
        # Without the chat's markers, which are single tokens anyway.
        text = tasks.as_plain(task)
        size += len(text)
        index += 1
        yield text
