"""Traces on disk: one safetensors file that any tool can read, or write for another implementation.

Tensors are the stages of `trace.py` under their names, and the inputs `probe.tokens`,
`probe.positions` (int64) and `probe.padding_mask` (bool, true on real tokens). Metadata, all text:
`format`, `version` and `config` (the fields of `ModelConfig` as JSON) must be there; `dtype` (of
matrix products), `skip_expert`, `crosses_window` and `description` are for the reader.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from openzaya.checkpoint.atomic import write_bytes
from openzaya.checkpoint.headers import read_header
from openzaya.checkpoint.trace import Probe, capture, make_probe, stages
from openzaya.errors import UserError
from openzaya.model.config import ModelConfig
from openzaya.model.model import Zaya

FORMAT = "openzaya-trace"
VERSION = "1"
_DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "f32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "f16": "float16",
}
"""Compute dtypes by the names that other tools give them."""

GOLDEN = Path(__file__).parent / "golden"
"""The bundled checkpoint, a folder that opens like any other, with its trace beside the weights."""

GOLDEN_TRACE = GOLDEN / "trace.safetensors"

_DESCRIPTION = (
    "Every tensor is [rows, seq, ...] in the arrangement of probe.tokens, zero on padding. Stages "
    "in the order of computation; q and k are [.., heads, head_dim]. router.state is what the next "
    "layer averages with; router.margin is the best probability + balancing bias minus the second. "
    "The skip class is number num_experts, with the meaning that skip_expert names; its balancing "
    "bias is the checkpoint's, which transformers' from_pretrained replaces by -1."
)


@dataclass(frozen=True)
class Trace:
    """A trace in memory.

    Attributes:
        config: of the model.
        dtype: of its matrix products, by name, such as "float32".
        probe: the inputs.
        tensors: by stage; a trace of another implementation may lack some or have others.
    """

    config: ModelConfig
    dtype: str
    probe: Probe
    tensors: dict[str, Tensor]


def make_trace(model: Zaya, probe: Probe | None = None) -> Trace:
    """Capture a model's trace, on its own probe unless another is given.

    Raises:
        UserError: if the probe has token ids outside the model's vocabulary.
    """
    probe = make_probe(model.config) if probe is None else probe
    low, high = int(probe.tokens.min()), int(probe.tokens.max())
    if low < 0 or high >= model.config.vocab_size:
        raise UserError(
            f"the trace's probe has token ids from {low} to {high}, the model's vocabulary is "
            f"{model.config.vocab_size}: the trace is of another model"
        )
    dtype = str(model.compute_dtype).removeprefix("torch.")
    return Trace(model.config, dtype, probe, capture(model, probe))


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace, whole or not at all; an existing trace is replaced, another file is not.

    Raises:
        UserError: if the disk is full or cannot be written.
    """
    probe, window = trace.probe, trace.config.sliding_window
    crosses = "hybrid_sliding" in trace.config.types and probe.tokens.shape[1] > (window or 0)
    tensors = {
        "probe.tokens": probe.tokens,
        "probe.positions": probe.positions,
        "probe.padding_mask": probe.padding_mask,
        **trace.tensors,
    }
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "config": trace.config.model_dump_json(),
        "dtype": trace.dtype,
        "skip_expert": trace.config.skip_expert,
        "crosses_window": json.dumps(crosses),
        "description": _DESCRIPTION,
    }
    content = save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata)
    content = _in_order(content)
    if path.is_file():
        _check_is_trace(path)
    write_bytes(path, content)


def _check_is_trace(path: Path) -> None:
    """Refuse to replace a file that is none, such as the weights that were traced."""
    with suppress(UserError):
        if read_header(path).metadata.get("format") == FORMAT:
            return
    raise UserError(f"{path} exists and is no trace; choose another file")


def _in_order(content: bytes) -> bytes:
    """A safetensors file with its metadata sorted: the library shuffles them with every write."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data stay aligned
    return len(text).to_bytes(8, "little") + text + content[end:]


def read_trace(path: Path, complete: bool = False) -> Trace:
    """Read a trace.

    Args:
        path: the file.
        complete: whether every stage must be there with the shape that the configuration gives it.
            Traces of other implementations may lack stages, and their shapes are for
            `trace_compare.compare` to judge.

    Raises:
        UserError: if there is no such file, it is damaged or no trace, its probe is missing or does
            not fit together, or, with `complete`, a stage is missing or has another shape.
    """
    if not path.is_file():
        raise UserError(f"{path} is no file: give a trace that `openzaya trace` has written")
    try:
        with safe_open(path, framework="pt") as handle:
            metadata = handle.metadata() or {}
            tensors = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, KeyError) as error:
        raise UserError(
            f"{path} is damaged or no safetensors file, and cannot be opened: {error}"
        ) from error
    if metadata.get("format") != FORMAT:
        raise UserError(f"{path} is no trace: its metadata does not say format = {FORMAT!r}")
    if metadata.get("version") != VERSION:
        raise UserError(
            f"{path}: version {metadata.get('version')!r} of the trace format cannot be read here, "
            f"only {VERSION!r}"
        )
    try:
        config = ModelConfig.model_validate_json(metadata.get("config", ""))
    except ValidationError as error:
        reason = error.errors()[0]
        where = ".".join(map(str, reason["loc"])) or "config"
        raise UserError(
            f"{path}: its metadata `config` does not describe a model: {where}: {reason['msg']}"
        ) from error
    probe = _read_probe(tensors, path)
    if complete:
        _check_stages(tensors, config, probe, path)
    names = dict.fromkeys((*stages(config), *tensors))  # in the order of computation
    tensors = {name: tensors[name] for name in names if name in tensors}
    spelled = metadata.get("dtype", "float32")
    dtype = _DTYPES.get(spelled.removeprefix("torch.").lower())
    if dtype is None:
        raise UserError(
            f"{path}: dtype is {spelled!r}; it is that of matrix products, one of "
            f"{', '.join(sorted(set(_DTYPES.values())))}"
        )
    return Trace(config, dtype, probe, tensors)


def _read_probe(tensors: dict[str, Tensor], path: Path) -> Probe:
    """Take the probe out of the tensors of a file."""
    parts = []
    for name in ("probe.tokens", "probe.positions", "probe.padding_mask"):
        if name not in tensors:
            raise UserError(f"{path}: the tensor {name} is missing")
        parts.append(tensors.pop(name))
    tokens, positions, mask = parts
    if tokens.dim() != 2 or not tokens.numel() or tokens.is_floating_point():
        raise UserError(f"{path}: probe.tokens must be whole numbers of shape [rows, seq]")
    for name, part in (("positions", positions), ("padding_mask", mask)):
        if part.shape != tokens.shape or part.is_floating_point():
            raise UserError(
                f"{path}: probe.{name} must be whole numbers of shape {list(tokens.shape)} like "
                f"probe.tokens, not {part.dtype} of shape {list(part.shape)}"
            )
    return Probe(tokens.long(), positions.long(), mask.bool())


def _check_stages(
    tensors: dict[str, Tensor], config: ModelConfig, probe: Probe, path: Path
) -> None:
    for name, shape in stages(config).items():
        if name not in tensors:
            raise UserError(f"{path}: the tensor {name} is missing")
        wanted = [*probe.tokens.shape, *shape]
        if list(tensors[name].shape) != wanted:
            raise UserError(f"{path}: {name} has shape {list(tensors[name].shape)}, not {wanted}")
