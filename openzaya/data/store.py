"""The tokenised documents of a source: shards that were built beforehand, or a cache of them.

A cache folder's name is a digest of everything its content depends on, so a changed source or
tokenizer simply gets another folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from openzaya.config.recipe import SourceConfig
from openzaya.data.conversations import ChatEncoder
from openzaya.data.shard_build import Done, build_shards
from openzaya.data.shards import FORMAT, TextStore, open_shards, read_manifest
from openzaya.data.sources import fingerprint
from openzaya.data.tokenizer import Tokenizer
from openzaya.errors import UserError

CHAT_FORMAT = 1  # raise it whenever the same conversations would give other files

Progress = Callable[[int, int], None]


def open_store(
    name: str,
    source: SourceConfig,
    tokenizer: Tokenizer,
    cache_dir: str | Path,
    progress: Progress | None = None,
    chat: ChatEncoder | None = None,
) -> TextStore:
    """Opens the shards that a source names, or its cached ones, which are built if need be.

    Several processes may open the same store at once: one builds it, the others wait, all read the
    same files.

    Args:
        name: The source's name in the recipe, for messages.
        source: Any kind but `tasks`.
        tokenizer: Encodes the documents; names in them are never read as special tokens.
        cache_dir: Created if missing.
        progress: Called with (documents, tokens) so far, after every few megabytes of text.
        chat: Encodes conversations; None takes our own format.

    Raises:
        UserError: as `build_shards` does, if the cache cannot be written, or if shards are damaged
            or were made with another tokenizer.
    """
    if source.kind == "shards":
        return _open_given(name, Path(str(source.path)).expanduser(), tokenizer)
    cache = Path(cache_dir)
    chat = chat or ChatEncoder(tokenizer)
    # What only shapes rows (`whole`, `style`) leaves the store as it is; `path` is in the content.
    relevant = source.model_dump(include={"kind", "field", "split", "separator", "heldout"})
    parts = [FORMAT, relevant, tokenizer.digest, fingerprint(source, name)]
    if source.heldout_from == "end":
        parts.append("end")
    if source.kind == "chat":
        parts += [CHAT_FORMAT, source.loss_on, chat.digest]
    folder = cache / hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    def report(done: Done) -> None:
        if progress is not None:
            progress(done.documents, done.tokens)

    try:
        build_shards(folder, source, name, chat, cache=True, progress=report)
    except OSError as error:
        raise UserError(
            f"source {name!r}: cannot write its tokens to the cache {cache}: {error.strerror}: "
            "free some room or choose another folder"
        ) from error
    return open_shards(folder)


def _open_given(name: str, folder: Path, tokenizer: Tokenizer) -> TextStore:
    try:
        manifest = read_manifest(folder)
        store = open_shards(folder, manifest)
    except UserError as error:
        raise UserError(f"source {name!r}: {error}") from error
    if manifest.tokenizer != tokenizer.digest:
        raise UserError(
            f"source {name!r}: the shards in {folder} were made with another tokenizer "
            f"({manifest.tokenizer[:12]}, {manifest.vocab_size:,} entries) than this run has "
            f"({tokenizer.digest[:12]}, {tokenizer.vocab_size:,} entries): build them again with "
            "the run's tokenizer.json, or leave `tokenizer.path` and `start_from` out to train "
            "with theirs"
        )
    return store
