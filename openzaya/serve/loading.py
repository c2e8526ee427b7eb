"""Opening what a user points at: a model folder, or the newest whole checkpoint of a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from openzaya.checkpoint.dialects import read_config
from openzaya.checkpoint.load import Residual, load_model
from openzaya.checkpoint.lora import read_adapter
from openzaya.checkpoint.run import find_checkpoint, to_stderr
from openzaya.data.chat import CHAT_TEMPLATE
from openzaya.data.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, Tokenizer
from openzaya.errors import UserError
from openzaya.model.lora import attach
from openzaya.model.model import Zaya
from openzaya.serve.chat_format import ChatFormat, NativeFormat, TemplateFormat
from openzaya.serve.request import check_vocabulary

TEMPLATE = "chat_template.jinja"
GENERATION_CONFIG = "generation_config.json"

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Compute dtypes by name. float16 is none of them: its range is too small for these models."""


def open_checkpoint(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    say: Callable[[str], None] = to_stderr,
) -> tuple[Zaya, Tokenizer]:
    """Open model and tokenizer, verified where the folder has a manifest.

    Args:
        path: a model folder (config.json, model.safetensors, tokenizer.json) or a training run,
            of which the newest whole checkpoint is taken.
        dtype: of matrix products.
        device: as torch names it.
        say: told about newer checkpoints that are damaged.

    Raises:
        UserError: if there is no whole checkpoint, a file is missing or damaged, tokenizer and
            model do not belong together, or there is no such device.
    """
    return open_folder(find_checkpoint(path, say), dtype, device)


def open_folder(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    adapter: Path | None = None,
    residual: Residual = "float32",
) -> tuple[Zaya, Tokenizer]:
    """Open a model folder that `find_checkpoint` has returned.

    Args:
        adapter: folder of a LoRA adapter to keep beside the weights.
        residual: as `load_model`.

    Raises:
        UserError: as `open_checkpoint`, or if the adapter is not one of this model.
    """
    _check_device(device)
    file = folder / TOKENIZER_FILE
    if not file.is_file():
        raise UserError(
            f"{folder} has no {TOKENIZER_FILE}: copy the one that the model was trained with there"
        )
    tokenizer = Tokenizer.load(file)
    lora = None if adapter is None else read_adapter(adapter, read_config(folder))
    model = load_model(folder, dtype, device, residual)
    if lora is not None:
        attach(model, lora)
    check_vocabulary(model, tokenizer)
    return model, tokenizer


def _check_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    # torch has one for unknown names, one for what it was built without, and one for the rest
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"device {name!r} cannot be used here: {reason}; try cpu") from error


def open_chat_format(folder: Path, tokenizer: Tokenizer) -> ChatFormat:
    """The checkpoint's own chat template, or our format where it has none.

    Raises:
        UserError: if a file or the template cannot be read, or the tokenizer knows no chat.
    """
    config = _read_json(folder / TOKENIZER_CONFIG_FILE)
    source, where = config.get("chat_template"), folder / TOKENIZER_CONFIG_FILE
    if (folder / TEMPLATE).is_file():
        source, where = (folder / TEMPLATE).read_text(encoding="utf-8"), folder / TEMPLATE
    if isinstance(source, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default", next(iter(named.values()), None))
    if not source or source == CHAT_TEMPLATE:
        # Ours is better encoded by its own code, the very one that training uses.
        return NativeFormat(tokenizer)
    tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None:
            tokens[name] = token
    added = _read_json(folder / TOKENIZER_FILE).get("added_tokens", [])
    control = [token["content"] for token in added]
    ends = _read_json(folder / GENERATION_CONFIG).get("eos_token_id", [])
    ends = ends if isinstance(ends, list) else [ends]
    return TemplateFormat(tokenizer, source, control, tokens, ends, str(where))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}; download or save it again") from error
    return content
