"""Which of the configuration dialects a config.json is in, and reading and writing each.

| dialect | era | layers are | tensors |
|---|---|---|---|
| A | base | halves, with a list entry for each | legacy |
| B | scalar legacy | halves, one value for all | legacy |
| C | native, what `transformers` reads | blocks | native |
| openzaya | ours, for what no other tool computes | blocks | native |

The dialect is told by content, not by name. Any key that only the legacy dialects have makes a
configuration legacy, since there the shared keys mean other things (`num_hidden_layers` counts
halves); native keys beside it must then agree with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ValidationError

from openzaya.checkpoint import legacy_config, native_config
from openzaya.checkpoint.headers import no_duplicates
from openzaya.checkpoint.tensors import Layout, has_layout
from openzaya.checkpoint.weights import CONFIG
from openzaya.errors import UserError
from openzaya.model.config import ModelConfig

Dialect = Literal["A", "B", "C", "openzaya"]

RECORD: Literal["openzaya"] = "openzaya"
"""Key of a table in config.json with what the dialect itself has no words for."""

SKIP_MEANING: dict[Dialect, str] = {"A": "identity", "B": "identity", "C": "zero"}
"""What tools that read a dialect compute for a token that takes the skip class."""

_VISION = ("vision_config", "image_token_id", "vision_lora")


@dataclass(frozen=True)
class Description:
    """What a config.json says.

    Attributes:
        model: the architecture.
        dialect: that it is written in.
        eos: all its end-of-text tokens; the model's own is the first.
    """

    model: ModelConfig
    dialect: Dialect
    eos: tuple[int, ...] = field(default=())

    @property
    def layout(self) -> Layout:
        """Of the tensors beside it."""
        return layout_of(self.dialect)


def layout_of(dialect: Dialect) -> Layout:
    """Tensor layout that goes with a dialect."""
    return "legacy" if dialect in ("A", "B") else "native"


def is_native(config: ModelConfig) -> bool:
    """Whether tools that read dialect C compute this architecture the way we do."""
    return is_zaya(config) and config.skip_expert == SKIP_MEANING["C"]


def is_zaya(config: ModelConfig) -> bool:
    """Whether this is ZAYA1's architecture, apart from the meaning of the skip class."""
    return (
        config.attention == "cca"
        and config.router == "zaya"
        and config.residual == "scaled"
        and config.skip_expert != "none"
    )


def describe(data: Any, where: str) -> Description:
    """Read the content of a config.json in any dialect.

    Args:
        where: named in errors.

    Raises:
        UserError: for another architecture, a switch that is not implemented, or values that are
            missing, disagree, or do not fit together.
    """
    if not isinstance(data, dict):
        raise UserError(f"{where} holds no table of settings.")
    data = {name: value for name, value in data.items() if value is not None}
    if data.get("model_type") == RECORD:
        own = validated(data.get(RECORD, {}), where)
        return Description(own, RECORD, (own.eos_token_id,))
    legacy = legacy_config.marker(data)
    vision = [name for name in _VISION if name in data]
    if vision:
        raise UserError(
            f"{where}: {vision[0]!r} marks a vision-language checkpoint; only text models can be "
            "opened."
        )
    known = legacy_config.MODEL_TYPES if legacy else ("zaya",)
    if data.get("model_type") not in known:
        raise UserError(
            f"{where}: model_type is {data.get('model_type')!r}, not 'zaya'. "
            "Only ZAYA1-style checkpoints can be opened."
        )
    dialect: Dialect
    if legacy:
        fields, dialect = legacy_config.read(data, where)
    else:
        fields, dialect = native_config.read(data, where), "C"
    record = data.get(RECORD, {})
    if not isinstance(record, dict):
        raise UserError(f"{where}: {RECORD!r} is {record!r}, not a table.")
    fields["skip_expert"] = record.get("skip_expert", SKIP_MEANING[dialect])
    if dialect == "C":
        fields["residual_in_fp32"] = record.get("residual_in_fp32", True)
    eos = fields.get("eos_token_id", [])
    eos = eos if isinstance(eos, list) else [eos]
    if eos:
        fields["eos_token_id"] = eos[0]
    config = validated(fields, where)
    for token in eos:
        if type(token) is not int or not 0 <= token < config.vocab_size:
            raise UserError(
                f"{where}: eos_token_id holds {token!r}, which is outside the vocabulary "
                f"({config.vocab_size})."
            )
    if legacy:
        legacy_config.check_native_keys(data, config, where)
    return Description(config, dialect, tuple(eos) or (config.eos_token_id,))


def config_from_json(data: Any, where: str) -> ModelConfig:
    """As `describe`, the architecture alone."""
    return describe(data, where).model


def describe_folder(folder: Path) -> Description:
    """Read the config.json of a checkpoint folder.

    Raises:
        UserError: if there is none, or as `describe`.
    """
    file = folder / CONFIG
    try:
        data = json.loads(file.read_text(), object_pairs_hook=no_duplicates)
    except FileNotFoundError as error:
        raise UserError(f"{folder} is no checkpoint: it has no {CONFIG}.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    return describe(data, str(file))


def read_config(folder: Path) -> ModelConfig:
    """The architecture of the checkpoint in `folder`; errors as `describe_folder`."""
    return describe_folder(folder).model


def write_config(
    config: ModelConfig, dialect: Dialect, dtype: str = "float32", eos: tuple[int, ...] = ()
) -> dict[str, Any]:
    """The content of config.json in a dialect.

    Args:
        dtype: that the weights are stored in.
        eos: all end-of-text tokens, if there are more than the model's own.

    Raises:
        UserError: if the dialect cannot express the architecture.
    """
    if dialect == RECORD:
        return {"model_type": RECORD, RECORD: config.model_dump(mode="json")}
    if not is_zaya(config) or not has_layout(config, layout_of(dialect)):
        raise UserError(
            f"dialect {dialect} has no words for this model: it knows ZAYA1's attention, router, "
            "residual scaling and skip class only."
        )
    write: Callable[[ModelConfig, Dialect], dict[str, Any]]
    write = native_config.write if dialect == "C" else legacy_config.write
    data = write(config, dialect)
    if len(eos) > 1:
        data["eos_token_id"] = list(eos)
    data["dtype" if dialect == "C" else "torch_dtype"] = dtype
    record: dict[str, Any] = {}
    if config.skip_expert != SKIP_MEANING[dialect]:
        record["skip_expert"] = config.skip_expert
    if dialect == "C" and not config.residual_in_fp32:
        record["residual_in_fp32"] = False
    return {**data, RECORD: record} if record else data


def differences(a: ModelConfig, b: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Fields in which two models differ, with both values.

    How layer types are spelled, and settings of sliding layers that a model has none of, are no
    difference.
    """

    def fields(config: ModelConfig) -> dict[str, Any]:
        content = config.model_dump(mode="json")
        content["layer_types"] = list(config.types)
        if "hybrid_sliding" not in config.types:
            del content["sliding_window"], content["sliding_rope_theta"]
        return content

    ours, theirs = fields(a), fields(b)
    names = dict.fromkeys([*ours, *theirs])
    pairs = {name: (ours.get(name), theirs.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def own_dialect(config: ModelConfig) -> Dialect:
    """Where we save a model: C if other tools compute the same as we do, else our own."""
    return "C" if is_native(config) else RECORD


def validated(fields: Any, where: str) -> ModelConfig:
    """The architecture with these fields.

    Raises:
        UserError: naming every field that is wrong or missing.
    """
    try:
        return ModelConfig.model_validate(fields)
    except ValidationError as error:
        lines = [
            f"{'.'.join(str(part) for part in problem['loc']) or 'config'}: {problem['msg']}"
            for problem in error.errors()
        ]
        raise UserError(f"{where} does not describe a model: " + "; ".join(lines)) from error


def parse_dialect(text: str) -> Dialect:
    """The dialect of that letter.

    Raises:
        UserError: if there is none.
    """
    for dialect in get_args(Dialect):
        if text.upper() == dialect:
            return dialect
    raise UserError(f"dialect {text!r} is unknown: A (base era), B (scalar legacy) or C (native)")
