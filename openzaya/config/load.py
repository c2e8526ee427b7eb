"""Read a recipe, apply `key=value` overrides, and say clearly what is wrong with it."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args

import tomli_w
from pydantic import BaseModel, ValidationError

from openzaya.config.recipe import Recipe
from openzaya.errors import UserError
from openzaya.model.config import PRESETS, ModelConfig

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
"""Folder of the recipes that come with the project."""


def load_recipe(
    name: str,
    overrides: Sequence[str] = (),
    architecture: Callable[[str, str], ModelConfig] | None = None,
) -> Recipe:
    """Load a recipe by path, or by its bare name from the project's `recipes/`.

    Args:
        name: path of a TOML file, or a name such as "demo".
        overrides: `key=value` with dotted keys; phases go by name (`phases.text.lr=1e-3`). Values
            are TOML; anything that is not is taken as a string.
        architecture: given a recipe's `start_from` and name, what the recipe leaves out of
            `model`.

    Raises:
        UserError: if the file is missing or no TOML, or a key or value is wrong.
    """
    path = Path(name)
    if not path.is_file() and (RECIPES / f"{name}.toml").is_file():
        path = RECIPES / f"{name}.toml"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        known = ", ".join(sorted(file.stem for file in RECIPES.rglob("*.toml"))) or "none"
        raise UserError(f"no recipe {name!r}: no such file, and the named ones are {known}.") from (
            error
        )
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"recipe {path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"recipe {path} is not valid TOML: {error}") from error
    for override in overrides:
        _apply(data, override)
    start, model = data.get("start_from"), data.get("model", {})
    partial = isinstance(model, dict) and "preset" not in model and "hidden_size" not in model
    if architecture is not None and isinstance(start, str) and partial:
        whole = architecture(start, str(data.get("name", "")))
        data["model"] = {**whole.model_dump(mode="json"), **model}
    return recipe_from_dict(data, str(path))


def recipe_from_dict(data: dict[str, Any], where: str) -> Recipe:
    """Validate a recipe's content.

    Args:
        where: named in errors.

    Raises:
        UserError: naming every wrong key and value.
    """
    _expand_preset(data, where)
    try:
        # The JSON route is strict about types and still takes lists for tuples.
        return Recipe.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as error:
        lines = [_describe(problem, data) for problem in error.errors()]
        raise UserError(f"{where} is not a valid recipe:\n  " + "\n  ".join(lines)) from error


def recipe_to_toml(recipe: Recipe) -> str:
    """The recipe with every default spelled out, as TOML that loads to an equal recipe."""
    return tomli_w.dumps(recipe.model_dump(mode="json", exclude_none=True))


def differences(a: Recipe, b: Recipe) -> list[str]:
    """Dotted keys, with both values, in which two recipes differ."""
    flat_a, flat_b = (dict(_flatten(r.model_dump(mode="json"))) for r in (a, b))
    return [
        f"{key}: {flat_a.get(key)!r} -> {flat_b.get(key)!r}"
        for key in sorted(flat_a.keys() | flat_b.keys())
        if flat_a.get(key) != flat_b.get(key)
    ]


def _flatten(value: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flatten(item, f"{prefix}{key}.")
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for i, item in enumerate(value):
            yield from _flatten(item, f"{prefix}{i}.")
    else:
        yield prefix.rstrip("."), value


def _expand_preset(data: dict[str, Any], where: str) -> None:
    """Spell out `model = "small"` and `model = {preset = "small", num_experts = 4}` in place."""
    model = data.get("model")
    if isinstance(model, str):
        model = {"preset": model}
    if not isinstance(model, dict) or "preset" not in model:
        return
    name = model["preset"]
    preset = PRESETS.get(name) if isinstance(name, str) else None
    if preset is None:
        raise UserError(f"{where}: unknown model preset {name!r}; there are {', '.join(PRESETS)}")
    rest = {key: value for key, value in model.items() if key != "preset"}
    data["model"] = {**preset.model_dump(mode="json"), **rest}


def _apply(data: dict[str, Any], override: str) -> None:
    key, sep, text = override.partition("=")
    if not sep or not key:
        raise UserError(f"override {override!r} is not of the form key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    node: Any = data
    *parents, last = key.split(".")
    for part in parents:
        if isinstance(node, list):
            node = _item(node, part, override)
        elif isinstance(node, dict):
            if part == "model" and isinstance(node.get(part), str):
                node[part] = {"preset": node[part]}
            node = node.setdefault(part, {})
        if not isinstance(node, dict | list):
            raise UserError(f"override {override!r}: {part!r} is a value, not a table")
    if isinstance(node, list):
        raise UserError(f"override {override!r}: name a field of the entry")
    node[last] = value


def _item(items: list[Any], part: str, override: str) -> Any:
    for item in items:
        if isinstance(item, dict) and item.get("name") == part:
            return item
    if part.isdigit() and int(part) < len(items):
        return items[int(part)]
    names = [item.get("name") for item in items if isinstance(item, dict)]
    raise UserError(f"override {override!r}: no entry {part!r}; there are {names}")


def _describe(problem: Any, data: dict[str, Any]) -> str:
    """One line for one of pydantic's errors, with the nearest known key for unknown ones."""
    loc = problem["loc"]
    where = ".".join(str(part) for part in loc) or "recipe"
    if problem["type"] == "extra_forbidden":
        fields = _fields_at(Recipe, loc[:-1])
        near = difflib.get_close_matches(str(loc[-1]), fields, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(fields))}"
        return f"{where}: unknown key ({hint})"
    if problem["type"] == "missing":
        return f"{where}: missing"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] in ("value_error", "missing"):
        return f"{where}: {message}" if loc else message
    return f"{where}: {message[0].lower()}{message[1:]}, got {problem['input']!r}"


def _fields_at(model: type[BaseModel], loc: tuple[Any, ...]) -> list[str]:
    """Field names of the section that a location lies in."""
    current: Any = model
    for part in loc:
        if isinstance(current, type) and issubclass(current, BaseModel):
            field = current.model_fields.get(str(part))
            current = None if field is None else field.annotation
            if isinstance(current, UnionType):  # a section that may be left out
                current = next((a for a in get_args(current) if a is not NoneType), None)
        else:  # a table or list of sections: one step into an entry
            sections = [a for a in get_args(current) if isinstance(a, type)]
            current = next((a for a in sections if issubclass(a, BaseModel)), None)
    if isinstance(current, type) and issubclass(current, BaseModel):
        return list(current.model_fields)
    return []
