"""What travels with the weights: tokenizer, chat template, generation settings, licence."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from openzaya.checkpoint.dialects import Description
from openzaya.checkpoint.manifest import MANIFEST
from openzaya.checkpoint.weights import CONFIG, INDEX
from openzaya.errors import UserError

GENERATION = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"

_CARRIED = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    GENERATION,
    "README.md",
    "LICENSE*",
    "NOTICE*",
)
_WRITTEN = (CONFIG, INDEX, MANIFEST, "model*.safetensors")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")


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
        if file.is_file() and any(fnmatch(file.name, name) for name in _CARRIED):
            result.files[file.name] = file.read_bytes()
        else:
            result.left_out.append(file.name)
    if GENERATION in result.files:
        _mend_generation(result, folder, source)
    if TOKENIZER in result.files:
        _name_tokenizer_class(result, folder)
    return result


def _mend_generation(result: Companions, folder: Path, source: Description) -> None:
    content = _parse(result, folder, GENERATION)
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
    if "tokenizer_class" not in content:
        _store(result, TOKENIZER_CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast", **content})
        result.notes.append(f"{TOKENIZER_CONFIG}: tokenizer_class named")


def _parse(result: Companions, folder: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads(result.files[name])
    except (ValueError, RecursionError) as error:
        raise UserError(f"{folder / name} is damaged and cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{folder / name} is damaged: it holds no table of settings")
    return content


def _store(result: Companions, name: str, content: dict[str, Any]) -> None:
    result.files[name] = (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
