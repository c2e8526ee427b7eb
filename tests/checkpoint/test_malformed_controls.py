"""Odd but no contradiction: these open, convert, and compute what the unspoiled checkpoint does."""

from __future__ import annotations

import json

import pytest
import torch

from openzaya.checkpoint.compare import compare, open_for_reading
from openzaya.checkpoint.convert import convert
from openzaya.checkpoint.dialects import describe_folder
from openzaya.checkpoint.plan import plan_conversion
from openzaya.checkpoint.weights import CONFIG
from tests.checkpoint.checkpoints import (
    DIALECTS,
    LISTS,
    edit_config,
    halves,
    legacy,
    logits,
    make,
    read_config_json,
    rewrite,
)


@pytest.fixture(scope="module")
def unspoiled(tmp_path_factory):
    """Logits of the unspoiled checkpoint, by dialect."""
    place = tmp_path_factory.mktemp("unspoiled")
    return {dialect: logits(make(place / dialect, dialect)) for dialect in DIALECTS}


def _opens_and_converts(folder, to, expected):
    assert torch.equal(logits(folder), expected)
    target = folder.with_name("to")
    convert(plan_conversion(folder, target, to, force=True))
    assert compare(open_for_reading(folder), open_for_reading(target)).equal


TWICE = {name: halves(at, *[value] * 3) + [0] * 6 for name, (at, value) in LISTS.items()}


@pytest.mark.parametrize(
    ("dialect", "changes"),
    [
        *((dialect, {"rope_scaling": False}) for dialect in DIALECTS),
        *((dialect, {"rope_scaling": None}) for dialect in DIALECTS),
        *((dialect, {"rope_type": "default"}) for dialect in DIALECTS),
        *((dialect, {"cca_time0": ..., "cca_time1": ...}) for dialect in DIALECTS),
        *((dialect, {"clamp_temp": False, "use_cache": True}) for dialect in DIALECTS),
        *((dialect, {"torch_dtype": "bfloat16"}) for dialect in DIALECTS),
        ("A", {"num_hidden_layers": 120}),
        ("A", {"num_hidden_layers": 7}),
        ("A", TWICE),
        ("A", {**TWICE, "num_hidden_layers": 12}),
        ("A", {"model_type": "smoe"}),
        ("A", {"num_attention_heads": 16}),
        ("A", {"kv_channels": ..., "num_attention_heads": 2}),
        ("B", {"swa_layers": [0] * 6}),
        ("B", {"kv_channels": ...}),
        ("B", {"head_dim": ...}),
        ("B", {"num_query_groups": ...}),
        ("B", {"moe_intermediate_size": 24, "router_hidden_size": 16, "rms_norm_eps": 1e-5}),
        ("B", {"layer_types": ["hybrid"] * 3, "rope_parameters": {"rope_theta": 100.0}}),
        ("C", {"layer_types": ...}),
    ],
)
def test_odd_settings_that_mean_the_same(dialect, changes, unspoiled, tmp_path):
    folder = make(tmp_path / "source", dialect)
    edit_config(folder, **changes)
    _opens_and_converts(folder, "C" if dialect != "C" else "B", unspoiled[dialect])


def test_the_list_of_layers_wins_over_their_number(tmp_path):
    folder = make(tmp_path / "source", "A")
    edit_config(folder, num_hidden_layers=120)
    assert describe_folder(folder).model.num_hidden_layers == 3


@pytest.mark.parametrize("inside", [False, True])
def test_a_stray_rope_type_opens(inside, tmp_path):
    """As published: beside the tables of the layer types, or beside all of them."""
    folder = make(tmp_path / "source", "C")
    expected = logits(folder)
    rope = {**read_config_json(folder)["rope_parameters"], "rope_type": "default"}
    edit_config(folder, **({"rope_parameters": rope} if inside else {"rope_type": "default"}))
    assert torch.equal(logits(folder), expected)


def test_the_other_familys_names_open(tmp_path):
    """`smoe_*` keys, `rotary_base`, its block's name, and lists padded with zeros."""
    folder = make(tmp_path / "source", "A")
    expected = logits(folder)
    data = read_config_json(folder)
    lists = {name: values + [0] * 6 for name, values in data.items() if name in LISTS}
    router = lists.pop("zaya_mlp_expansion")
    edit_config(
        folder,
        **lists,
        model_type="smoe",
        num_hidden_layers=12,
        smoe_layers=data["zaya_layers"],
        zaya_layers=...,
        smoe_mlp_expansion=router,
        zaya_mlp_expansion=...,
        rotary_base=data["rope_theta"],
        rope_theta=...,
    )
    assert "smoe_layers" in (folder / CONFIG).read_text()
    rewrite(folder, _rename(".zaya_block.", ".smoe_block."))
    assert torch.equal(logits(folder), expected)


def _rename(*pairs: str):
    def change(tensors):
        for name in list(tensors):
            new = name
            for old, other in zip(pairs[::2], pairs[1::2], strict=True):
                new = new.replace(old, other)
            tensors[new] = tensors.pop(name)

    return change


@legacy
@pytest.mark.parametrize(
    "pairs",
    [
        (".self_attn.qkv.", ".self_attn.cca."),
        (".zaya_block.router.", ".moe.router."),
        (".zaya_block.router.", ".router."),
        (".zaya_block.", ".moe.zaya_block."),
        (".zaya_block.experts.", ".experts."),
        (".zaya_block.experts.", ".moe.experts."),
        (".self_attn.qkv.", ".self_attn.cca.", ".zaya_block.", ".moe."),
    ],
)
def test_other_spellings_open(pairs, dialect, unspoiled, tmp_path):
    folder = make(tmp_path / "source", dialect)
    rewrite(folder, _rename(*pairs))
    _opens_and_converts(folder, "C", unspoiled[dialect])
    assert json.loads((tmp_path / "to" / CONFIG).read_text())["num_hidden_layers"] == 3
