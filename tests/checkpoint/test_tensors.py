"""The table against published counts, the model's own state dict, and a mapping by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from openzaya.checkpoint.tensors import (
    TABLE,
    canonical,
    entries,
    guess_layout,
    has_layout,
    markdown,
    parameter_count,
    tensor_count,
)
from openzaya.model.accounting import count_parameters
from openzaya.model.config import PRESETS
from openzaya.model.model import Zaya
from tests.checkpoint.legacy import to_legacy
from tests.model.helpers import small_config

DOCS = Path(__file__).resolve().parents[2] / "docs" / "formats.md"


@pytest.mark.parametrize(
    ("preset", "native", "legacy", "parameters"),
    [("zaya1-8b", 1283, 2483, 8.840), ("zaya1-74b", 1923, 4683, 74.794)],
)
def test_counts_of_the_published_sizes(preset, native, legacy, parameters):
    """Oracle: tensor counts of the published files, and the size that others report."""
    config = PRESETS[preset]
    assert tensor_count(config, "native") == native
    assert tensor_count(config, "legacy") == legacy
    assert round(parameter_count(config) / 1e9, 3) == parameters


@pytest.mark.parametrize("preset", PRESETS)
def test_the_table_counts_what_accounting_counts(preset):
    """Oracle: the closed form of `model/accounting.py`."""
    assert parameter_count(PRESETS[preset]) == count_parameters(PRESETS[preset]).total


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention": "standard"},
        {"router": "linear"},
        {"residual": "plain"},
        {"skip_expert": "none"},
        {"tie_word_embeddings": False},
        {"cca_time0": 3, "cca_time1": 4, "num_attention_heads": 6},
    ],
)
def test_the_native_side_is_the_models_state_dict(changes):
    """Oracle: the model, in every architecture that it can have."""
    config = small_config(**changes)
    with torch.device("meta"):
        state = Zaya(config).state_dict()
    assert {e.native: e.shape for e in entries(config)} == {
        name: tuple(tensor.shape) for name, tensor in state.items()
    }
    assert has_layout(config, "legacy") == {"attention", "router"}.isdisjoint(changes)


@pytest.mark.parametrize("tied", [True, False])
def test_the_legacy_side_is_the_mapping_by_hand(tied):
    """Oracle: `legacy.py`, written from the published description and not from the table."""
    config = small_config(tie_word_embeddings=tied)
    tensors = {name: torch.randn(shape) for name, shape in _shapes(config).items()}
    by_hand = to_legacy(tensors, config.num_hidden_layers)
    names = [name for entry in entries(config) for name in entry.legacy]
    assert len(set(names)) == len(names)
    assert set(names) == by_hand.keys()
    for entry in entries(config):
        parts = [by_hand[name] for name in entry.legacy]
        assert {tuple(part.shape) for part in parts} == {entry.part_shape("legacy")}
        whole = torch.stack(parts) if entry.row.stacked else parts[0]
        assert torch.equal(whole, tensors[entry.native]), entry.native


def _shapes(config):
    return {entry.native: entry.shape for entry in entries(config)}


def test_aliases_lead_to_the_name_of_the_table():
    for spelled, name in {
        "model.layers.4.self_attn.cca.temp": "model.layers.4.self_attn.qkv.temp",
        "model.layers.5.moe.router.down_proj.bias": (
            "model.layers.5.zaya_block.router.down_proj.bias"
        ),
        "model.layers.5.moe.zaya_block.router.rmsnorm_eda.weight": (
            "model.layers.5.zaya_block.router.rmsnorm_eda.weight"
        ),
        "model.layers.5.experts.local_experts.3.linear_fc1.weight": (
            "model.layers.5.zaya_block.experts.local_experts.3.linear_fc1.weight"
        ),
        "model.layers.5.smoe_block.router.balancing_biases": (
            "model.layers.5.zaya_block.router.balancing_biases"
        ),
    }.items():
        assert canonical(spelled) == name
        assert canonical(name) == name


def test_layouts_are_told_apart_by_names():
    config = small_config()
    for layout in ("native", "legacy"):
        names = [name for entry in entries(config) for name in entry.names(layout)]
        found = guess_layout(names)
        assert found is not None
        assert found[0] == layout
    assert guess_layout(["model.embed_tokens.weight", "lm_head.weight"]) is None


def test_the_documentation_is_the_table():
    """`make golden` writes it anew."""
    assert _parts()[1] == "\n".join(markdown())
    assert len(list(markdown())) == len(TABLE) + 2


def _parts() -> tuple[str, str, str]:
    """The page before, in and after the table."""
    before, _, rest = DOCS.read_text().partition("<!-- table -->\n")
    table, _, after = rest.partition("\n<!-- end of table -->")
    return before, table, after


if __name__ == "__main__":
    before, _, after = _parts()
    table = "\n".join(markdown())
    DOCS.write_text(f"{before}<!-- table -->\n{table}\n<!-- end of table -->{after}")
