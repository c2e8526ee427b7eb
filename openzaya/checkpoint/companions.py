"""What travels with the weights: tokenizer, chat template, generation settings, licence."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import tokenizers

from openzaya.checkpoint.dialects import Description
from openzaya.checkpoint.manifest import MANIFEST
from openzaya.checkpoint.weights import CONFIG, INDEX
from openzaya.errors import UserError

GENERATION = "generation_config.json"
TEMPLATE = "chat_template.jinja"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"

CARRIED = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    TEMPLATE,
    "chat_template.json",
    GENERATION,
    "README.md",
    "LICENSE*",
    "NOTICE*",
)
_WRITTEN = (CONFIG, INDEX, MANIFEST, "model*.safetensors")
_SAMPLING: dict[str, Callable[[float], bool]] = {
    "temperature": lambda value: 0 <= value < float("inf"),
    "top_p": lambda value: 0 < value <= 1,
    "top_k": lambda value: value >= -1 and value == int(value),
    "min_p": lambda value: 0 <= value <= 1,
}
"""Settings of sampling, and which values they can have."""


@dataclass
class Companions:
    """Files for the folder of a converted checkpoint.

    Attributes:
        files: content by name.
        notes: what was changed in them, for the user.
        left_out: files of the source that are not carried along.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def read_companions(folder: Path, source: Description) -> Companions:
    """Read all that goes along, and put right what its readers would trip over.

    - Sampling settings beside `do_sample` off: as published, refused by `transformers` on save.
      They say how to sample, so sampling is switched on; `top_k` -1 (all) becomes 0.
    - A tokenizer configuration without its class makes `transformers` look into config.json, which
      it cannot read in the legacy dialects; the class is named.

    Raises:
        UserError: if one of them is damaged.
    """
    result = Companions()
    for file in sorted(folder.iterdir()):
        if file.name.startswith(".") or any(fnmatch(file.name, name) for name in _WRITTEN):
            continue
        if file.is_file() and any(fnmatch(file.name, name) for name in CARRIED):
            result.files[file.name] = file.read_bytes()
        else:
            result.left_out.append(file.name)
    for name in result.files:
        _check_readable(result, folder, name)
    if GENERATION in result.files:
        _mend_generation(result, folder, source)
    if TOKENIZER in result.files:
        _name_tokenizer_class(result, folder)
    return result


def _check_readable(result: Companions, folder: Path, name: str) -> None:
    """Text must be text, JSON must be JSON, and the tokenizer a tokenizer."""
    try:
        if name.endswith(".json"):
            json.loads(result.files[name])
        elif not name.endswith(".model"):
            result.files[name].decode()
        if name == TOKENIZER:
            tokenizers.Tokenizer.from_buffer(result.files[name])
    except Exception as error:  # `tokenizers` raises bare Exception on malformed files
        raise UserError(
            f"{folder / name} is damaged and cannot be read: {error}. Copy it again, or remove it."
        ) from error


def _mend_generation(result: Companions, folder: Path, source: Description) -> None:
    content = _parse(result, folder, GENERATION)
    for name, good in _SAMPLING.items():
        value = content.get(name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and good(value)):
            raise UserError(
                f"{folder / GENERATION}: {name} is {value!r}, which is no such setting."
            )
    before = dict(content)
    if any(content.get(name) is not None for name in _SAMPLING) and not content.get("do_sample"):
        content["do_sample"] = True
        result.notes.append(f"{GENERATION}: do_sample switched on, as its settings are for it")
    if content.get("top_k") == -1:
        content["top_k"] = 0
        result.notes.append(f"{GENERATION}: top_k -1 (all tokens) written as 0")
    if source.eos:
        content.setdefault(
            "eos_token_id", list(source.eos) if len(source.eos) > 1 else source.eos[0]
        )
    if content != before:
        _store(result, GENERATION, content)


def _name_tokenizer_class(result: Companions, folder: Path) -> None:
    content = {}
    if TOKENIZER_CONFIG in result.files:
        content = _parse(result, folder, TOKENIZER_CONFIG)
    named = content.get("tokenizer_class", "")
    if not isinstance(named, str):
        raise UserError(f"{folder / TOKENIZER_CONFIG}: tokenizer_class is {named!r}, not a name.")
    if not named:
        _store(result, TOKENIZER_CONFIG, {**content, "tokenizer_class": "PreTrainedTokenizerFast"})
        result.notes.append(f"{TOKENIZER_CONFIG}: tokenizer_class named")


def _parse(result: Companions, folder: Path, name: str) -> dict[str, Any]:
    content = json.loads(result.files[name])
    if not isinstance(content, dict):
        raise UserError(f"{folder / name} is damaged: it holds no table of settings")
    return content


def _store(result: Companions, name: str, content: dict[str, Any]) -> None:
    result.files[name] = (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
