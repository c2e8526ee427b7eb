"""Settings that contradict themselves, each other or the tensors, and damage beside the model."""

from __future__ import annotations

from typing import Any

import pytest

from openzaya.checkpoint.load import load_model
from openzaya.checkpoint.weights import CONFIG
from openzaya.data.tokenizer import Tokenizer
from tests.checkpoint.checkpoints import (
    DIALECTS,
    LISTS,
    SLIDING,
    check_refused,
    edit_config,
    every_dialect,
    halves,
    legacy,
    make,
)


def _refused(folder, dialect, changes, *names):
    edit_config(folder, **changes)
    check_refused(folder, dialect, CONFIG, *names)


# Everywhere


@every_dialect
@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"model_type": "llama"}, ("model_type is 'llama'",)),
        ({"model_type": ...}, ("model_type is None",)),
        ({"clamp_temp": True}, ("clamp_temp is True",)),
        ({"num_experts_per_tok": 2}, ("num_experts_per_tok", "2")),
        ({"attention_bias": True}, ("attention_bias is True",)),
        ({"lm_head_bias": True}, ("lm_head_bias is True",)),
        ({"hidden_act": "gelu"}, ("hidden_act", "'gelu'")),
        ({"attention_dropout": 0.1}, ("attention_dropout is 0.1",)),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ("rope_scaling", "yarn")),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ("rope_scaling", "linear")),
        ({"quantization_config": {"quant_method": "fp8"}}, ("quantization_config",)),
        ({"vision_config": {"depth": 32}}, ("vision_config",)),
        ({"image_token_id": 151646}, ("image_token_id",)),
        ({"vision_lora": {"rank": 8}}, ("vision_lora",)),
        ({"hidden_size": ...}, ("hidden_size",)),
        ({"vocab_size": 0}, ("vocab_size",)),
        ({"vocab_size": "many"}, ("vocab_size",)),
        ({"eos_token_id": 61}, ("eos_token_id 61 is outside the vocabulary",)),
        ({"eos_token_id": "</s>"}, ("eos_token_id",)),
        ({"tie_word_embeddings": "perhaps"}, ("tie_word_embeddings",)),
        ({"openzaya": 3}, ("openzaya",)),
        ({"openzaya": {"skip_expert": "one"}}, ("skip_expert",)),
        ({"cca_time0": 0}, ("cca_time0",)),
    ],
)
def test_settings_that_are_refused(changes, names, dialect, tmp_path):
    _refused(make(tmp_path / "source", dialect), dialect, changes, *names)


@every_dialect
@pytest.mark.parametrize(
    ("key", "value"), [("vocab_size", 64), ("hidden_size", 64), ("cca_time0", 3), ("cca_time1", 3)]
)
def test_sizes_that_the_tensors_do_not_have(key, value, dialect, tmp_path):
    _refused(make(tmp_path / "source", dialect), dialect, {key: value}, f"{key} = {value}")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"zaya"', "[" * 100_000, b"\xff\xfe"])
def test_a_config_that_is_no_table(text, tmp_path):
    folder = make(tmp_path / "source", "B")
    (folder / CONFIG).write_bytes(text if isinstance(text, bytes) else text.encode())
    check_refused(folder, "B", CONFIG)


@every_dialect
@pytest.mark.parametrize("other", DIALECTS)
def test_the_config_of_the_other_layout(other, dialect, tmp_path):
    folder = make(tmp_path / "source", dialect)
    (folder / CONFIG).write_bytes((make(tmp_path / "other", other) / CONFIG).read_bytes())
    if "C" in (dialect, other) and dialect != other:
        check_refused(folder, dialect, CONFIG, "model.layers.0.")
    else:
        load_model(folder)


# Dialect A


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize(
    "kind", ["disagree", "zero", "wrong halves", "elsewhere", "short", "empty"]
)
def test_lists_that_disagree(kind, name, tmp_path):
    at, value = LISTS[name]
    entries = {
        "disagree": halves(at, value, value, 2 * value),
        "zero": halves(at, value, 0, value),
        "wrong halves": halves(not at, value, value, value),
        "elsewhere": [*halves(at, value, value, value), 2 * value, 0],
        "short": halves(at, value, value),
        "empty": [],
    }[kind]
    names = (name, "6 half-layers") if kind in ("short", "empty") else (name,)
    _refused(make(tmp_path / "source", "A"), "A", {name: entries}, *names)


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        (["a", 4, 4, "a", "a", 4], "zaya_layers[2] is 4"),
        (["a", 4, "a", "a", "a", 4], "zaya_layers[3] is 'a'"),
        ([4, "a"] * 3, "zaya_layers[0] is 4"),
        (["a", 4, "a", 8, "a", 4], "zaya_layers has layers of 4 and of 8 experts"),
        (["a", 0] * 3, "zaya_layers[1] is 0"),
        (["a", "4"] * 3, "zaya_layers[1] is '4'"),
        (["a", 4, "m", 4, "a", 4], "zaya_layers[2] is 'm'"),
        (["a", 4, "a"], "zaya_layers must be a list"),
        ([], "zaya_layers must be a list"),
        ("a4a4a4", "zaya_layers must be a list"),
        (["a", 8] * 3, "has shape"),
    ],
)
def test_lists_of_layers_that_are_refused(layers, said, tmp_path):
    _refused(make(tmp_path / "source", "A"), "A", {"zaya_layers": layers}, said)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"num_key_value_heads": 4}, ("num_query_groups_list", "num_key_value_heads")),
        ({"num_query_groups": 1}, ("num_query_groups_list", "num_query_groups says 1")),
        ({"num_experts": 8}, ("zaya_layers", "num_experts says 8")),
        ({"ffn_hidden_size": 24}, ("ffn_hidden_size", "ffn_hidden_size_list says 48")),
        ({"ffn_hidden_size_list": halves(False, 47, 47, 47)}, ("ffn_hidden_size 47",)),
        ({"head_dim": 32}, ("head_dim", "kv_channels says 16")),
        ({"kv_channels": ..., "num_attention_heads": 3}, ("no multiple of num_attention_heads 3",)),
        ({"kv_channels": 8}, ("num_attention_heads * head_dim = 32",)),
        ({"rotary_base": 7.0}, ("rope_theta", "rotary_base says 7.0")),
        ({"smoe_layers": ["a", 8] * 3}, ("smoe_layers",)),
        ({"smoe_mlp_expansion": [0, 8] * 3}, ("zaya_mlp_expansion", "smoe_mlp_expansion says 8")),
        ({"zaya_mlp_expansion": ...}, ("router width is missing",)),
        ({"sliding_window": 4}, ("sliding_window is 4", "swa_layers")),
        ({"zaya_use_eda": False}, ("zaya_use_eda is False",)),
        ({"zaya_use_mod": False}, ("zaya_use_mod is False",)),
        ({"cca": False}, ("cca is False",)),
        ({"scale_residual_merge": False}, ("scale_residual_merge is False",)),
        ({"gated_linear_unit": False}, ("gated_linear_unit is False",)),
    ],
)
def test_facts_of_dialect_a_that_disagree(changes, names, tmp_path):
    _refused(make(tmp_path / "source", "A"), "A", changes, *names)


# Dialect B


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"num_hidden_layers": 7}, ("num_hidden_layers is 7", "even")),
        ({"num_hidden_layers": 0}, ("num_hidden_layers is 0",)),
        ({"num_hidden_layers": "6"}, ("num_hidden_layers is '6'",)),
        ({"num_hidden_layers": ...}, ("num_hidden_layers is None",)),
        ({"num_query_groups": 1}, ("num_query_groups", "num_key_value_heads says 2")),
        ({"num_key_value_heads": 4}, ("num_query_groups", "num_key_value_heads says 4")),
        ({"head_dim": 32}, ("head_dim", "kv_channels says 16")),
        ({"kv_channels": 32}, ("head_dim", "kv_channels says 32")),
        ({"head_dim": ..., "kv_channels": ...}, ("head_dim or kv_channels",)),
        ({"num_attention_heads": 8}, ("num_attention_heads * head_dim = 128",)),
        ({"num_attention_heads": ...}, ("number of query heads is missing",)),
        ({"ffn_hidden_size": 47}, ("ffn_hidden_size 47",)),
        ({"ffn_hidden_size": 24}, ("moe_intermediate_size",)),
        ({"ffn_hidden_size": ...}, ("ffn_hidden_size",)),
        ({"zaya_mlp_expansion": ...}, ("zaya_mlp_expansion",)),
        ({"num_experts": ...}, ("number of experts is missing",)),
        ({"num_experts": 3}, ("the configuration needs [4]",)),
        ({"rope_theta": ...}, ("rope_theta or rotary_base",)),
        ({"moe_router_topk": 2}, ("moe_router_topk is 2",)),
        ({"normalization": "LayerNorm"}, ("normalization is 'LayerNorm'",)),
        ({"add_bias_linear": True}, ("add_bias_linear is True",)),
        ({"sliding_window": 5}, ("sliding_window is 5", "swa_layers")),
        # Native keys beside the legacy ones.
        ({"moe_intermediate_size": 48}, ("moe_intermediate_size would be 24", "48")),
        ({"router_hidden_size": 256}, ("router_hidden_size would be 16", "256")),
        ({"rms_norm_eps": 1e-6}, ("rms_norm_eps would be 1e-05", "1e-06")),
        ({"layer_types": ["hybrid", "hybrid_sliding", "hybrid"]}, ("layer_types",)),
        ({"layer_types": ["hybrid"] * 6}, ("layer_types",)),
        ({"rope_parameters": {"rope_theta": 5.0}}, ("rope_parameters says 5.0",)),
        ({"rope_parameters": {"hybrid": {"rope_theta": 5.0}}}, ("rope_parameters says 5.0",)),
    ],
)
def test_facts_of_dialect_b_that_disagree(changes, names, tmp_path):
    _refused(make(tmp_path / "source", "B"), "B", changes, *names)


@legacy
@pytest.mark.parametrize("layers", [4, 12])
def test_another_depth_than_the_tensors(layers, dialect, tmp_path):
    """As 120 on the tensors of 80 half-layers; in dialect A it is the list that counts."""
    changes: dict[str, Any] = {"num_hidden_layers": layers}
    if dialect == "A":
        changes = {"zaya_layers": ["a", 4] * (layers // 2)}
        changes |= {
            name: halves(at, *[value] * (layers // 2)) for name, (at, value) in LISTS.items()
        }
    said = f"the configuration has {layers} half-layers, the tensors are of 6"
    _refused(make(tmp_path / "source", dialect), dialect, changes, said)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"swa_layers": [3, 0, 0, 0, 5, 0]}, ("swa_layers holds windows of [3, 5]",)),
        ({"swa_layers": [3, 0, 0, 0]}, ("swa_layers must have 6 entries",)),
        ({"swa_layers": 3}, ("swa_layers must have 6 entries",)),
        ({"swa_layers": [0, 3, 0, 0, 0, 3]}, ("swa_layers",)),
        ({"swa_layers": [-3, 0, 0, 0, -3, 0]}, ("swa_layers holds windows of [-3]",)),
        ({"swa_layers": ["3", 0, 0, 0, "3", 0]}, ("swa_layers",)),
        ({"swa_layers": ..., "sliding_window": 4}, ("sliding_window is 4",)),
        ({"sliding_window": 3}, ("sliding_window would be 4", "3")),
        ({"layer_types": ["hybrid"] * 3}, ("layer_types",)),
        (
            {"rope_parameters": {"hybrid_sliding": {"rope_theta": 5.0}}},
            ("rope_parameters says 5.0",),
        ),
        ({"swa_layers": [[3], 0, 0, 0, [3], 0]}, ("swa_layers",)),
        ({"swa_layers": [3, 0, 0, 5, 3, 0]}, ("swa_layers",)),
        ({"swa_layers": [3, 0, 0, 0, 3, 0, 7, 0]}, ("swa_layers",)),
    ],
)
def test_windows_that_are_refused(changes, names, tmp_path):
    folder = make(tmp_path / "source", "B", layer_types=SLIDING, sliding_window=4)
    edit_config(folder, **changes)
    check_refused(folder, "B", CONFIG, *names)


ROPES = [
    {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0},
    {"hybrid": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}},
    {"rope_theta": 100.0, "partial_rotary_factor": 1.0},
    {"hybrid": {"rope_theta": 100.0, "partial_rotary_factor": 1.0}},
]


@legacy
@pytest.mark.parametrize("rope", ROPES)
def test_rope_parameters_beside_legacy_keys(rope, dialect, tmp_path):
    """Newer libraries add them when they save; what they say must be so, or be refused."""
    _refused(
        make(tmp_path / "source", dialect), dialect, {"rope_parameters": rope}, "rope_parameters"
    )


@legacy
@pytest.mark.parametrize("rope", [[], True, "default"])
def test_rope_parameters_that_are_no_table(rope, dialect, tmp_path):
    _refused(
        make(tmp_path / "source", dialect), dialect, {"rope_parameters": rope}, "rope_parameters"
    )


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads"])
@pytest.mark.parametrize("value", ["x", [1], {"a": 1}])
def test_head_widths_that_cannot_be_computed(key, value, tmp_path):
    folder = make(tmp_path / "source", "A")
    _refused(folder, "A", {"kv_channels": ..., key: value}, key)


# Dialect C


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"num_query_groups": 2}, ("'num_query_groups' makes this a legacy configuration",)),
        ({"swa_layers": [3, 0, 0]}, ("'swa_layers' makes this a legacy configuration",)),
        ({"norm_epsilon": 1e-5}, ("'norm_epsilon' makes this a legacy configuration",)),
        ({"zaya_layers": ["a", 4] * 3}, ("ffn_hidden_size", "a legacy configuration")),
        ({"moe_router_topk": 2}, ("moe_router_topk is 2",)),
        ({"num_hidden_layers": 6, "layer_types": ...}, ("has 6 layers, the tensors are of 3",)),
        ({"num_hidden_layers": 4}, ("layer_types has 3 entries for 4 layers",)),
        ({"layer_types": ["hybrid", "mamba", "hybrid"]}, ("layer_types",)),
        ({"layer_types": ["hybrid_sliding"] * 3}, ("sliding_window must be set",)),
        ({"layer_types": ["hybrid_sliding"] * 3, "sliding_window": 0}, ("sliding_window",)),
        ({"num_attention_heads": 3}, ("num_attention_heads (3) must be a multiple",)),
        ({"head_dim": 32}, ("num_attention_heads * head_dim = 128",)),
        ({"num_experts": 3}, ("num_experts = 3",)),
        ({"num_experts": ...}, ("num_experts",)),
        ({"moe_intermediate_size": 48}, ("moe_intermediate_size = 48",)),
        ({"router_hidden_size": 256}, ("router_hidden_size = 256",)),
        ({"rope_parameters": {}}, ("rope_parameters", "'hybrid'")),
        ({"rope_parameters": []}, ("rope_parameters is [], not a table",)),
        ({"rope_parameters": {"rope_theta": 100.0}}, ("rope_parameters", "'hybrid'")),
        ({"rope_parameters": {"hybrid": {"rope_type": "yarn"}}}, ("rope_type 'yarn' of hybrid",)),
        ({"rope_parameters": {"hybrid": {"rope_theta": -1.0}}}, ("rope_theta",)),
        ({"rope_parameters": {"hybrid": {"rope_theta": "x"}}}, ("rope_theta",)),
        ({"rms_norm_eps": 0.0}, ("rms_norm_eps",)),
        ({"rope_parameters": {"hybrid": {"type": "linear", "factor": 4.0}}}, ("linear",)),
        ({"rope_theta": 5.0}, ("rope_theta",)),
        ({"rope_theta": 100.0, "rope_parameters": ...}, ("rope_theta",)),
        ({"partial_rotary_factor": 1.0}, ("partial_rotary_factor",)),
        ({"kv_channels": 32}, ("kv_channels",)),
        ({"zaya_use_eda": False}, ("zaya_use_eda",)),
        ({"eos_token_id": [1, "x", 99]}, ("eos_token_id",)),
    ],
)
def test_facts_of_dialect_c_that_disagree(changes, names, tmp_path):
    _refused(make(tmp_path / "source", "C"), "C", changes, *names)


# Files beside the model: a conversion refuses to carry damage along


@legacy
@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, b"\xff\xfe"])
@pytest.mark.parametrize(
    "name",
    [
        "generation_config.json",
        "tokenizer_config.json",
        pytest.param(
            "tokenizer.json",
        ),
    ],
)
def test_damaged_companions(name, text, dialect, tmp_path):
    folder = make(tmp_path / "source", dialect)
    Tokenizer.train(["some text"] * 3, 263).save(folder / "tokenizer.json")
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    check_refused(folder, dialect, name, convert_alone=True)
