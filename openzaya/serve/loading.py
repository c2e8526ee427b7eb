"""Opening what a user points at: a model folder, or the newest whole checkpoint of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from openzaya.checkpoint.dialects import read_config
from openzaya.checkpoint.load import Residual, load_model
from openzaya.checkpoint.lora import read_adapter
from openzaya.checkpoint.run import find_adapter, find_checkpoint, to_stderr
from openzaya.data.template import read_json, read_template
from openzaya.data.tokenizer import TOKENIZER_FILE, Tokenizer
from openzaya.errors import UserError
from openzaya.model.lora import attach
from openzaya.model.model import Zaya
from openzaya.serve.chat_format import ChatFormat, NativeFormat, TemplateFormat
from openzaya.serve.request import check_vocabulary

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
        adapter: folder of a LoRA adapter to keep beside the weights, or a run that trained one.
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
    lora = None
    if adapter is not None:
        lora = read_adapter(find_adapter(adapter), read_config(folder))
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
    template = read_template(folder, tokenizer)
    if template is None:
        return NativeFormat(tokenizer)
    ends = read_json(folder / GENERATION_CONFIG).get("eos_token_id", [])
    ends = ends if isinstance(ends, list) else [ends]
    return TemplateFormat(
        tokenizer, template.source, template.control, template.tokens, ends, template.where
    )
