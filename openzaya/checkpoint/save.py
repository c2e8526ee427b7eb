"""Writing a model that is in memory.

A pure ZAYA1 model is written in dialect C and opens in `transformers`. A model with any of the
classic alternatives, or with another meaning of the skip class, is no ZAYA1 model to other tools:
it gets `model_type` "openzaya" and the whole of our configuration instead, so that they refuse it
rather than compute something else.

`transformers` 5.24 sets the skip class's balancing bias to -1 whatever the checkpoint says, in
`from_pretrained`. The controller holds it at -1 by default; where it was trained to something else,
load the biases again there with `load_state_dict`.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from openzaya.checkpoint.dialects import own_dialect, write_config
from openzaya.checkpoint.weights import CONFIG, WEIGHTS
from openzaya.model.model import Zaya


def save_model(model: Zaya, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write config.json and weights into an existing folder (make it with `atomic_folder`).

    Args:
        dtype: of the stored parameters; None keeps theirs. Balancing biases are always fp32.
    """
    tensors = {
        name: tensor.detach().to(tensor.dtype if "balancing" in name or not dtype else dtype)
        for name, tensor in model.state_dict().items()
    }
    stored = str(model.model.embed_tokens.weight.dtype if dtype is None else dtype)
    config = write_config(model.config, own_dialect(model.config), stored.removeprefix("torch."))
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / WEIGHTS,
        metadata={"format": "pt"},
    )
