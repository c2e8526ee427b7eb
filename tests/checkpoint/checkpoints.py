"""Small checkpoints in dialects A, B and C, ways to spoil them, and what refusing them means."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from openzaya.checkpoint.convert import convert
from openzaya.checkpoint.load import load_model
from openzaya.checkpoint.manifest import MANIFEST
from openzaya.checkpoint.plan import plan_conversion
from openzaya.checkpoint.save import save_model
from openzaya.checkpoint.weights import CONFIG, INDEX, WEIGHTS
from openzaya.errors import UserError
from tests.checkpoint.legacy import to_legacy
from tests.model.helpers import plain_logits, small_model, tokens_for

DIALECTS = ("A", "B", "C")
every_dialect = pytest.mark.parametrize("dialect", DIALECTS)
every_layout = pytest.mark.parametrize("dialect", ["B", "C"])  # A has the files of B
legacy = pytest.mark.parametrize("dialect", ["A", "B"])
BLOCKS, EXPERTS = 3, 4
FULL = ("hybrid",) * BLOCKS
SLIDING = ("hybrid_sliding", "hybrid", "hybrid_sliding")

LISTS = {
    "cca_num_q_heads": (True, 4),
    "num_query_groups_list": (True, 2),
    "ffn_hidden_size_list": (False, 48),
    "zaya_mlp_expansion": (False, 16),
}
"""Lists of dialect A: whether values stand at the attention halves, and the value."""

Tensors = dict[str, Tensor]


def halves(at_attention: bool, *values: Any) -> list[Any]:
    """A list with an entry for each half-layer, zero where the value has no place."""
    return [x for value in values for x in ((value, 0) if at_attention else (0, value))]


@lru_cache(maxsize=64)
def _content(dialect: str, shard_bytes: int, seed: int, dtype: torch.dtype | None, changes: tuple):
    fields: dict[str, Any] = {"layer_types": FULL, "sliding_window": None, **dict(changes)}
    model = small_model(seed, **fields)
    with tempfile.TemporaryDirectory() as place:
        source, target = Path(place, "source"), Path(place, "target")
        source.mkdir()
        save_model(model, source, dtype)
        convert(plan_conversion(source, target, dialect, shard_bytes, force=True))
        return {file.name: file.read_bytes() for file in target.iterdir()}


def make(
    folder: Path,
    dialect: str,
    *,
    shard_bytes: int = 10**9,
    manifest: bool = False,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    **changes: Any,
) -> Path:
    """A checkpoint with every parameter random; without manifest unless asked for.

    Args:
        shard_bytes: 20,000 makes several shards and an index.
        changes: fields of `small_config`.
    """
    folder.mkdir()
    files = _content(dialect, shard_bytes, seed, dtype, tuple(sorted(changes.items())))
    for name, content in files.items():
        if manifest or name != MANIFEST:
            (folder / name).write_bytes(content)
    return folder


def make_sharded(folder: Path, dialect: str, **kwargs: Any) -> Path:
    """As `make`, in several shards with an index."""
    return make(folder, dialect, shard_bytes=20_000, **kwargs)


def shards(folder: Path) -> list[Path]:
    """Its files of tensors, in order."""
    return sorted(folder.glob("*.safetensors"))


def read_config_json(folder: Path) -> dict[str, Any]:
    return json.loads((folder / CONFIG).read_text())


def edit_config(folder: Path, **changes: Any) -> None:
    """Set keys of config.json; `...` removes one."""
    content = {**read_config_json(folder), **changes}
    content = {name: value for name, value in content.items() if value is not ...}
    (folder / CONFIG).write_text(json.dumps(content))


def edit_index(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    """Change the index's table of files by tensor."""
    content = json.loads((folder / INDEX).read_text())
    change(content["weight_map"])
    (folder / INDEX).write_text(json.dumps(content))


def read_tensors(folder: Path) -> Tensors:
    """All stored tensors of all shards."""
    return {name: t for file in shards(folder) for name, t in load_file(file).items()}


def rewrite(
    folder: Path, change: Callable[[Tensors], Any], file: str = WEIGHTS, **more: Tensor
) -> None:
    """Let `change` work on the tensors of one file, and write it again.

    Args:
        more: tensors to add.
    """
    tensors = load_file(folder / file)
    change(tensors)
    tensors |= more
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / file,
        metadata={"format": "pt"},
    )


def stored_names(native: str, dialect: str) -> list[str]:
    """What a native tensor's parts are called in a dialect, by the mapping of `legacy.py`."""
    if dialect == "C":
        return [native]
    return list(to_legacy({native: torch.zeros(EXPERTS, 1)}, BLOCKS))


def stored_name(native: str, dialect: str) -> str:
    """The first of `stored_names`."""
    return stored_names(native, dialect)[0]


def read_raw(file: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_raw(file: Path, header: dict[str, Any] | bytes, data: bytes) -> None:
    """Write whatever header there is to write."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def logits(folder: Path, **kwargs: Any) -> Tensor:
    """Of two fixed rows."""
    model = load_model(folder, **kwargs)
    return plain_logits(model, tokens_for(model, 2, 13))


def _openings(folder: Path, dialect: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "load_model", lambda: load_model(folder)
    for to in DIALECTS:
        if to != dialect:
            target = folder.with_name(f"converted-to-{to}")
            yield (
                f"convert to {to}",
                lambda to=to, target=target: convert(
                    plan_conversion(folder, target, to, 20_000, force=True)
                ),
            )


def check_refused(folder: Path, dialect: str, *names: str, convert_alone: bool = False) -> None:
    """Neither opens nor converts; messages name the place and `names`, and nothing is left.

    Args:
        convert_alone: what is wrong is beside the model, which opens by itself.
    """
    before = {path.name for path in folder.parent.iterdir()}
    for what, opening in _openings(folder, dialect):
        if convert_alone and what == "load_model":
            opening()
            continue
        with pytest.raises(UserError) as caught:
            opening()
        message = str(caught.value)
        assert str(folder) in message, f"{what}: {message}"
        assert "converted-to" not in message, f"{what}: {message}"
        for name in names:
            assert name in message, f"{what}: {message}"
        assert {path.name for path in folder.parent.iterdir()} == before, what
