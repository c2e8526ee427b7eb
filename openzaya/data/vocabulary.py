"""The tokenizer that a recipe asks for: read from its file, or trained on the recipe's sources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from openzaya.config.recipe import SourceConfig, TokenizerConfig
from openzaya.data import tasks
from openzaya.data.sources import documents
from openzaya.data.store import is_heldout
from openzaya.data.tokenizer import Tokenizer

# Generated tasks say the same few words again and again: more of them teach a vocabulary nothing.
TASK_BYTES = 500_000


def obtain_tokenizer(config: TokenizerConfig, sources: Mapping[str, SourceConfig]) -> Tokenizer:
    """Loads `config.path`, or trains on an equal share of `sample_bytes` from every source."""
    if config.path is not None:
        return Tokenizer.load(config.path)
    return Tokenizer.train(sample(sources, config.sample_bytes), config.vocab_size)


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
            if not is_heldout(index, text, source.heldout):
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
