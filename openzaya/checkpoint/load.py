"""Opening a checkpoint of any dialect as a model in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from openzaya.checkpoint.dialects import describe_folder
from openzaya.checkpoint.weights import find_weights, fit, read_all
from openzaya.errors import UserError
from openzaya.model.config import ModelConfig
from openzaya.model.model import Zaya

Residual = Literal["float32", "trained"]
Matrices = Literal["compute", "float32", "stored"]


def load_model(
    folder: Path,
    compute_dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    residual: Residual = "float32",
    matrices: Matrices = "compute",
    config: ModelConfig | None = None,
) -> Zaya:
    """Open a checkpoint, in any dialect, for inference or as a starting point of training.

    Args:
        compute_dtype: of matrix products.
        residual: "float32" keeps the residual stream in it, whatever the model was trained with;
            "trained" rounds it to the compute dtype where training did (ZAYA1-base), for results
            that match what was trained rather than the more precise ones.
        matrices: the dtype that matrices are held in (all else is fp32): "compute" is that of the
            products; "float32" is for training; "stored" is that of the file, which saves memory
            and costs the time to convert each as it is used.
        config: to compute by another architecture with the same tensors, such as another meaning
            of the skip class; None takes the checkpoint's.

    Raises:
        UserError: if a file is missing or damaged, the configuration cannot be read, or tensors
            are missing, unknown, of another shape or dtype, or not finite.
        ValueError: for another compute dtype than float32 and bfloat16.
    """
    if compute_dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"{compute_dtype} has too small a range for these models")
    described = describe_folder(folder)
    config = described.model if config is None else config
    if residual == "float32":
        config = config.model_copy(update={"residual_in_fp32": True})
    fitted = fit(find_weights(folder), config, described.layout, folder)
    with torch.device("meta"):
        model = Zaya(config, compute_dtype)
    held = {"compute": compute_dtype, "float32": torch.float32, "stored": None}[matrices]
    tensors = read_all(fitted, held, torch.float32)
    model.load_state_dict(tensors, assign=True)
    return model.to(device).eval()


def read_weights(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The configuration of a checkpoint and all its tensors by logical name, as stored.

    Raises:
        UserError: as `load_model`.
    """
    described = describe_folder(folder)
    fitted = fit(find_weights(folder), described.model, described.layout, folder)
    return described.model, read_all(fitted)


def read_tensors(file: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file that holds no weights.

    Raises:
        UserError: if it is missing or damaged.
    """
    if not file.is_file():
        raise UserError(f"{file.parent} is no complete checkpoint: {file.name} is missing.")
    try:
        with safe_open(file, framework="pt") as handle:
            return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is damaged and cannot be opened: {error}") from error
