"""The native checkpoint dialect: config.json and safetensors as `transformers` names them.

A pure ZAYA1 model is written with `model_type` "zaya" and opens in `transformers`. A model with
any of the classic alternatives, or with another meaning of the skip class, is no ZAYA1 model to
other tools: it gets `model_type` "openzaya" and the whole of our configuration instead, so that
they refuse it rather than compute something else.

`transformers` 5.24 sets the skip class's balancing bias to -1 whatever the checkpoint says, in
`from_pretrained`. The controller holds it at -1 by default; where it was trained to something else,
load the biases again there with `load_state_dict`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from openzaya.errors import UserError
from openzaya.model.config import ModelConfig
from openzaya.model.model import Zaya
from openzaya.model.precision import cast_for_inference

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_SAME_NAME = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "cca_time0",
    "cca_time1",
    "sliding_window",
    "max_position_embeddings",
    "num_experts",
    "moe_intermediate_size",
    "router_hidden_size",
    "rms_norm_eps",
    "tie_word_embeddings",
    "initializer_range",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)
"""Fields that the native config has under the same name."""

_FIXED = {
    "num_experts_per_tok": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "lm_head_bias": False,
    "attention_dropout": 0.0,
    "clamp_temp": False,
}
"""Native switches and legacy flags that we implement with this value only."""

_EMBEDDING = "model.embed_tokens.weight"

_LEGACY_MARKERS = ("zaya_layers", "ffn_hidden_size", "ffn_hidden_size_list", "zaya_mlp_expansion")


def is_native(config: ModelConfig) -> bool:
    """Whether other tools compute this architecture the way we do."""
    return (
        config.attention == "cca"
        and config.router == "zaya"
        and config.residual == "scaled"
        and config.skip_expert == "zero"
    )


def config_to_json(config: ModelConfig, dtype: str = "float32") -> dict[str, Any]:
    """The content of config.json."""
    if not is_native(config):
        return {"model_type": "openzaya", "openzaya": config.model_dump(mode="json")}
    fields = config.model_dump(mode="json")
    rope = {
        layer_type: {
            "rope_type": "default",
            "rope_theta": config.theta(layer_type),
            "partial_rotary_factor": config.partial_rotary_factor,
        }
        for layer_type in ("hybrid", "hybrid_sliding")
    }
    return {
        "model_type": "zaya",
        "architectures": ["ZayaForCausalLM"],
        **{name: fields[name] for name in _SAME_NAME},
        "layer_types": list(config.types),
        "rope_parameters": rope,
        **{name: _FIXED[name] for name in ("num_experts_per_tok", "hidden_act", "attention_bias")},
        "lm_head_bias": False,
        "dtype": dtype,
    }


def config_from_json(data: dict[str, Any], where: str) -> ModelConfig:
    """Read the content of a config.json.

    Args:
        where: named in errors.

    Raises:
        UserError: for another architecture, a legacy dialect, a switch that is not implemented,
            or values that do not fit together.
    """
    if not isinstance(data, dict):
        raise UserError(f"{where} holds no table of settings.")
    data = {name: value for name, value in data.items() if value is not None}
    if data.get("model_type") == "openzaya":
        return _validated(data.get("openzaya", {}), where)
    if data.get("model_type") != "zaya":
        raise UserError(
            f"{where}: model_type is {data.get('model_type')!r}, not 'zaya'. "
            "Only ZAYA1-style checkpoints can be opened."
        )
    legacy = [name for name in _LEGACY_MARKERS if name in data]
    if legacy:
        raise UserError(
            f"{where}: {legacy[0]!r} marks a legacy ZAYA1 dialect, in which the same keys mean "
            "other things; only the native dialect can be opened."
        )
    for name, value in _FIXED.items():
        if data.get(name, value) != value:
            raise UserError(f"{where}: {name} is {data[name]!r}; only {value!r} is implemented.")
    fields = {name: data[name] for name in _SAME_NAME if name in data}
    if isinstance(fields.get("eos_token_id"), list) and fields["eos_token_id"]:
        fields["eos_token_id"] = fields["eos_token_id"][0]
    fields.update({name: data[name] for name in ("layer_types",) if name in data})
    types = data.get("layer_types", ["hybrid"])
    fields.update(_rope_fields(data.get("rope_parameters"), types, where))
    return _validated(fields, where)


def _rope_fields(rope: Any, types: Any, where: str) -> dict[str, float]:
    """RoPE settings of the nested form; a stray top-level `rope_type` is dropped.

    Layers of a type that the model has must have an entry; without any settings the native
    defaults hold.
    """
    if rope is None:
        return {}
    names = {"hybrid": "rope_theta", "hybrid_sliding": "sliding_rope_theta"}
    fields: dict[str, float] = {}
    for layer_type, name in names.items():
        entry = rope.get(layer_type) if isinstance(rope, dict) else None
        used = isinstance(types, list | tuple) and layer_type in types
        if not used:
            if isinstance(entry, dict) and "rope_theta" in entry:
                fields[name] = entry["rope_theta"]
            continue
        if not isinstance(entry, dict):
            raise UserError(
                f"{where}: rope_parameters has no entry for the layer type {layer_type!r}; "
                "the native dialect has one table per layer type."
            )
        if entry.get("rope_type", "default") != "default":
            raise UserError(
                f"{where}: rope_type {entry['rope_type']!r} of {layer_type} is not implemented."
            )
        if "rope_theta" in entry:
            fields[name] = entry["rope_theta"]
        factor = entry.get("partial_rotary_factor", 1.0)
        if fields.setdefault("partial_rotary_factor", factor) != factor:
            raise UserError(f"{where}: layer types disagree about partial_rotary_factor.")
    return fields


def _validated(fields: dict[str, Any], where: str) -> ModelConfig:
    try:
        return ModelConfig.model_validate(fields)
    except ValidationError as error:
        lines = [
            f"{'.'.join(str(part) for part in problem['loc']) or 'config'}: {problem['msg']}"
            for problem in error.errors()
        ]
        raise UserError(f"{where} does not describe a model: " + "; ".join(lines)) from error


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
    config = config_to_json(model.config, stored.removeprefix("torch."))
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / WEIGHTS,
        metadata={"format": "pt"},
    )


def read_config(folder: Path) -> ModelConfig:
    """The architecture of the checkpoint in `folder`.

    Raises:
        UserError: if there is no readable config.json.
    """
    file = folder / CONFIG
    try:
        data = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise UserError(f"{folder} is no checkpoint: it has no {CONFIG}.") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    return config_from_json(data, str(file))


def load_model(
    folder: Path, compute_dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Zaya:
    """Open a checkpoint for inference or as a starting point of training.

    Args:
        compute_dtype: of matrix products; matrices are stored in it, the rest in fp32.

    Raises:
        UserError: if a file is missing or damaged, or tensors are missing, unknown, of another
            shape, or not finite.
    """
    config = read_config(folder)
    with torch.device("meta"):
        model = Zaya(config, compute_dtype)
    tensors = read_tensors(folder)
    if config.tie_word_embeddings:
        head = tensors.pop("lm_head.weight", None)  # some writers repeat the tied weight
        if head is not None and not torch.equal(head, tensors.get(_EMBEDDING, head[:0])):
            raise UserError(
                f"{folder}: lm_head.weight differs from {_EMBEDDING}, but {CONFIG} says that they "
                "are tied (tie_word_embeddings)."
            )
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    _check_tensors(expected, tensors, folder)
    model.load_state_dict(tensors, assign=True)
    for buffer_name, buffer in model.named_buffers():
        if "balancing" in buffer_name:
            buffer.data = buffer.data.float()
    cast_for_inference(model, compute_dtype)
    return model.to(device).eval()


def read_tensors(folder: Path, name: str = WEIGHTS) -> dict[str, Tensor]:
    """All tensors of a safetensors file, or of the sharded one when there is an index.

    Raises:
        UserError: if a file is missing or damaged.
    """
    index = folder / INDEX
    files = [folder / name]
    if name == WEIGHTS and not files[0].exists() and index.exists():
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            files = [folder / file for file in sorted(set(weight_map.values()))]
        except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
            raise UserError(f"{index} is damaged and cannot be read: {error}") from error
    tensors: dict[str, Tensor] = {}
    for file in files:
        if not file.is_file():
            raise UserError(f"{folder} is no complete checkpoint: {file.name} is missing.")
        try:
            with safe_open(file, framework="pt") as handle:
                for key in handle.keys():  # noqa: SIM118 (not a mapping)
                    tensors[key] = handle.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} is damaged and cannot be opened: {error}") from error
    return tensors


def _check_tensors(
    expected: dict[str, torch.Size], tensors: dict[str, Tensor], folder: Path
) -> None:
    problems = [f"{name} is missing" for name in sorted(expected.keys() - tensors.keys())]
    problems += [f"{name} is unknown" for name in sorted(tensors.keys() - expected.keys())]
    for name in expected.keys() & tensors.keys():
        tensor = tensors[name]
        if tensor.shape != expected[name]:
            problems.append(
                f"{name} has shape {list(tensor.shape)}, the configuration needs "
                f"{list(expected[name])}"
            )
        elif not bool(torch.isfinite(tensor).all()):
            problems.append(f"{name} has values that are not finite")
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise UserError(
            f"the weights in {folder} do not match its {CONFIG}: " + "; ".join(problems[:5]) + more
        )
