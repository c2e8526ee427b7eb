"""Tensors that are missing, too many, or not what they should be, in every dialect."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from openzaya.checkpoint.weights import INDEX, WEIGHTS
from tests.checkpoint.checkpoints import (
    EXPERTS,
    Tensors,
    check_refused,
    edit_config,
    every_dialect,
    every_layout,
    legacy,
    logits,
    make,
    make_sharded,
    read_tensors,
    rewrite,
    stored_name,
    stored_names,
)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
CCA = "model.layers.1.self_attn.qkv_proj"
GATE = "model.layers.1.mlp.gate"
GATE_UP, DOWN = (f"model.layers.1.mlp.experts.{name}_proj" for name in ("gate_up", "down"))
BIASES = f"{GATE}.balancing_biases"

OF_A_BLOCK = [
    "input_layernorm.weight",
    "self_attn.qkv_proj.q_proj.weight",
    "self_attn.qkv_proj.k_proj.weight",
    "self_attn.qkv_proj.v_proj_current.weight",
    "self_attn.qkv_proj.v_proj_delayed.weight",
    "self_attn.qkv_proj.conv_qk_depthwise.weight",
    "self_attn.qkv_proj.conv_qk_depthwise.bias",
    "self_attn.qkv_proj.conv_qk_grouped.weight",
    "self_attn.qkv_proj.conv_qk_grouped.bias",
    "self_attn.qk_norm.temp",
    "self_attn.o_proj.weight",
    "post_attention_layernorm.weight",
    "mlp.gate.down_proj.weight",
    "mlp.gate.down_proj.bias",
    "mlp.gate.router_states_scale",
    "mlp.gate.router_mlp.norm.weight",
    "mlp.gate.router_mlp.fc1.weight",
    "mlp.gate.router_mlp.fc1.bias",
    "mlp.gate.router_mlp.fc2.weight",
    "mlp.gate.router_mlp.fc2.bias",
    "mlp.gate.router_mlp.out_proj.weight",
    "mlp.gate.balancing_biases",
    "mlp.experts.gate_up_proj",
    "mlp.experts.down_proj",
    *(
        f"post_{half}_residual_scale.{kind}_{part}"
        for half in ("attention", "mlp")
        for kind in ("hidden_states", "residual")
        for part in ("scale", "bias")
    ),
]
EVERY_KIND = [
    EMBEDDING,
    "model.norm.weight",
    "model.input_hidden_states_scale",
    "model.input_hidden_states_bias",
    *(f"model.layers.1.{name}" for name in OF_A_BLOCK),
    *(f"model.layers.2.{name}" for name in OF_A_BLOCK if "post_mlp" in name),  # the model's end
]


# Missing and unknown


def test_every_kind_is_listed(tmp_path):
    names = {name.replace("layers.2.", "layers.1.") for name in EVERY_KIND}
    assert names == {
        name for name in read_tensors(make(tmp_path / "c", "C")) if ".0." not in name
    } - {name for name in read_tensors(tmp_path / "c") if ".layers.2." in name}


@every_layout
@pytest.mark.parametrize("name", EVERY_KIND)
def test_a_missing_tensor(name, dialect, tmp_path):
    folder = make(tmp_path / "source", dialect)
    gone = stored_name(name, dialect)
    rewrite(folder, lambda tensors: tensors.pop(gone))
    check_refused(folder, dialect, f"{gone} is missing")


@every_dialect
def test_a_missing_head(dialect, tmp_path):
    folder = make(tmp_path / "source", dialect, tie_word_embeddings=False)
    rewrite(folder, lambda tensors: tensors.pop(HEAD))
    check_refused(folder, dialect, f"{HEAD} is missing")


@every_dialect
def test_a_missing_tensor_of_several_shards(dialect, tmp_path):
    """Neither index nor shard knows it, so that they agree."""
    folder = make_sharded(tmp_path / "source", dialect)
    name = stored_name(BIASES, dialect)
    content = json.loads((folder / INDEX).read_text())
    rewrite(folder, lambda tensors: tensors.pop(name), content["weight_map"].pop(name))
    (folder / INDEX).write_text(json.dumps(content))
    check_refused(folder, dialect, f"{name} is missing")


@pytest.mark.parametrize("dialect", ["A"])
@pytest.mark.parametrize("expert", [0, EXPERTS - 1])
@pytest.mark.parametrize("name", [GATE_UP, DOWN])
def test_one_missing_expert(name, expert, dialect, tmp_path):
    folder = make(tmp_path / "source", dialect)
    gone = stored_names(name, dialect)[expert]
    rewrite(folder, lambda tensors: tensors.pop(gone))
    check_refused(folder, dialect, f"{gone} is missing")


@every_dialect
def test_all_experts_of_a_layer_missing(dialect, tmp_path):
    folder = make(tmp_path / "source", dialect)
    gone = [*stored_names(GATE_UP, dialect), *stored_names(DOWN, dialect)]
    rewrite(folder, lambda tensors: [tensors.pop(name) for name in gone])
    check_refused(folder, dialect, f"{gone[0]} is missing")


@every_dialect
def test_a_layer_too_few_and_a_layer_too_many(dialect, tmp_path):
    last = "layers.2." if dialect == "C" else "layers.4."
    folder = make(tmp_path / "many", dialect)
    more = {n.replace(last, "layers.6."): t for n, t in read_tensors(folder).items() if last in n}
    rewrite(folder, lambda tensors: tensors.update(more))
    check_refused(folder, dialect, "the tensors are of 7", "model.layers.6.")
    folder = make(tmp_path / "few", dialect)
    few = [name for name in read_tensors(folder) if last in name]
    rewrite(folder, lambda tensors: [tensors.pop(name) for name in few])
    check_refused(folder, dialect, f"model.{last}")


@every_layout
@pytest.mark.parametrize(
    "name",
    [
        "extra",
        "model.layers.1.self_attn.rotary_emb.inv_freq",
        "model.layers.0.mlp.gate.router_states_scale",
        "model.layers.0.post_attention_layernorm.bias",
        "lm_head.bias",
        "model.norm.weight_scale",
    ],
)
def test_an_unknown_tensor(name, dialect, tmp_path):
    """Block 0 has no router states to scale, in any dialect."""
    folder = make(tmp_path / "source", dialect)
    if "router_states_scale" in name:
        name = stored_name(name, dialect)
    rewrite(folder, lambda tensors: tensors.update({name: torch.ones(16)}))
    check_refused(folder, dialect, f"{name} is unknown")


@legacy
@pytest.mark.parametrize("part", ["scale", "bias"])
def test_the_first_half_layer_has_no_residual_to_scale(part, dialect, tmp_path):
    folder = make(tmp_path / "source", dialect)
    name = f"model.layers.0.res_scale.residual_{part}"
    rewrite(folder, lambda tensors: tensors.update({name: torch.ones(32)}))
    check_refused(folder, dialect, f"{name} is unknown")


@legacy
@pytest.mark.parametrize(
    ("name", "alias"),
    [
        ("model.layers.2.self_attn.qkv.temp", "model.layers.2.self_attn.cca.temp"),
        (
            "model.layers.3.zaya_block.router.rmsnorm_eda.weight",
            "model.layers.3.moe.router.rmsnorm_eda.weight",
        ),
        (
            "model.layers.3.zaya_block.experts.local_experts.2.linear_fc1.weight",
            "model.layers.3.experts.local_experts.2.linear_fc1.weight",
        ),
    ],
)
def test_a_tensor_under_two_names(name, alias, dialect, tmp_path):
    folder = make(tmp_path / "source", dialect)
    rewrite(folder, lambda tensors: tensors.update({alias: tensors[name] + 1}))
    check_refused(folder, dialect, name, alias, "names of the same tensor")


@every_dialect
def test_gate_and_up_as_tensors_of_their_own(dialect, tmp_path):
    folder = make(tmp_path / "source", dialect)
    name = stored_name(GATE_UP, dialect)
    where = name.removesuffix(".gate_up_proj").removesuffix(".linear_fc1.weight")

    def split(tensors: Tensors) -> None:
        gate, up = tensors.pop(name).chunk(2, dim=-2)
        tensors |= {f"{where}.gate_proj.weight": gate, f"{where}.up_proj.weight": up}

    rewrite(folder, split)
    check_refused(folder, dialect, f"{name} is missing")
    check_refused(folder, dialect, f"{where}.gate_proj.weight is unknown")


@every_dialect
def test_tensors_of_the_other_layout(dialect, tmp_path):
    folder = make(tmp_path / "source", dialect)
    other = make(tmp_path / "other", "C" if dialect != "C" else "A")
    (folder / WEIGHTS).write_bytes((other / WEIGHTS).read_bytes())
    check_refused(folder, dialect, "config.json is of a dialect", "model.layers.0.")


# Another dtype or another shape


@every_layout
@pytest.mark.parametrize("name", [DOWN, "model.norm.weight", BIASES])
@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64]
)
def test_dtypes_that_weights_do_not_have(dtype, name, dialect, tmp_path):
    folder = make(tmp_path / "source", dialect)
    stored = stored_name(name, dialect)
    rewrite(folder, lambda tensors: tensors.update({stored: tensors[stored].to(dtype)}))
    check_refused(folder, dialect, f"{stored} is ")


@every_layout
@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float8_e4m3fn])
def test_a_whole_checkpoint_in_such_a_dtype(dtype, dialect, tmp_path):
    folder = make(tmp_path / "source", dialect)
    rewrite(folder, lambda t: t.update({name: x.to(dtype) for name, x in t.items() if x.ndim > 1}))
    check_refused(folder, dialect, f"{EMBEDDING} is ")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64])
def test_a_whole_checkpoint_in_such_a_dtype_with_a_repeated_head(dtype, tmp_path):
    folder = make(tmp_path / "source", "C")

    def cast(tensors: Tensors) -> None:
        tensors[HEAD] = tensors[EMBEDDING].clone()
        tensors |= {name: t.to(dtype) for name, t in tensors.items() if t.ndim > 1}

    rewrite(folder, cast)
    check_refused(folder, "C", EMBEDDING)


@every_layout
@pytest.mark.parametrize(
    ("stored", "other"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("name", [f"{CCA}.k_proj.weight", DOWN])
def test_one_matrix_of_another_dtype(name, stored, other, dialect, tmp_path):
    folder = make(tmp_path / "source", dialect, dtype=stored)
    odd = stored_name(name, dialect)
    rewrite(folder, lambda tensors: tensors.update({odd: tensors[odd].to(other)}))
    check_refused(folder, dialect, odd, "the other matrices are")


@every_layout
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_balancing_biases_that_are_rounded(dtype, dialect, tmp_path):
    folder = make(tmp_path / "source", dialect, dtype=torch.bfloat16)
    name = stored_name(BIASES, dialect)
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    check_refused(folder, dialect, f"{name} is ", "must be F32")


@every_layout
@pytest.mark.parametrize(
    "name",
    [
        f"{CCA}.q_proj.weight",
        "model.layers.2.self_attn.o_proj.weight",
        f"{CCA}.conv_qk_grouped.weight",
        f"{GATE}.down_proj.weight",
        f"{GATE}.router_mlp.out_proj.weight",
        GATE_UP,
        DOWN,
        EMBEDDING,
    ],
)
def test_a_transposed_matrix(name, dialect, tmp_path):
    folder = make(tmp_path / "source", dialect)
    turned = stored_name(name, dialect)
    rewrite(folder, lambda tensors: tensors.update({turned: tensors[turned].mT}))
    check_refused(folder, dialect, f"{turned} has shape", "it is transposed")


@every_layout
@pytest.mark.parametrize(
    ("name", "change", "numbers"),
    [
        (EMBEDDING, lambda t: torch.cat([t, t[:3]]), "[64, 32], the configuration needs [61, 32]"),
        (EMBEDDING, lambda t: t[:-1], "[60, 32]"),
        (f"{GATE}.router_mlp.out_proj.weight", lambda t: t[:-1], "[4, 16]"),
        (BIASES, lambda t: t[:-1], "has shape [4], the configuration needs [5]"),
        (f"{CCA}.conv_qk_depthwise.weight", lambda t: t.squeeze(1), "[96, 2]"),
        (f"{CCA}.conv_qk_depthwise.weight", lambda t: t.mT, "[96, 2, 1]"),
        (f"{CCA}.conv_qk_grouped.weight", lambda t: t[..., :1], "[96, 16, 1]"),
        (f"{CCA}.q_proj.weight", lambda t: torch.cat([t, t]), "num_attention_heads * head_dim"),
        (f"{CCA}.v_proj_current.weight", lambda t: t[:8], "num_key_value_heads * head_dim / 2"),
        ("model.layers.1.self_attn.qk_norm.temp", lambda t: t[:1], "num_key_value_heads = 2"),
        ("model.norm.weight", lambda t: t[None], "[1, 32]"),
        (DOWN, lambda t: t[..., :-1], "moe_intermediate_size = 24"),
        (GATE_UP, lambda t: t[..., : t.shape[-2] // 2, :], "gate rows first"),
        ("model.input_hidden_states_bias", lambda t: t.sum(), "has shape []"),
    ],
)
def test_another_shape(name, change, numbers, dialect, tmp_path):
    folder = make(tmp_path / "source", dialect)
    stored = stored_name(name, dialect)
    rewrite(folder, lambda tensors: tensors.update({stored: change(tensors[stored])}))
    check_refused(folder, dialect, f"{stored} has shape", numbers)


@pytest.mark.parametrize("count", [EXPERTS - 1, EXPERTS + 1])
def test_a_stack_with_another_number_of_experts(count, tmp_path):
    folder = make(tmp_path / "source", "C")
    rewrite(folder, lambda t: t.update({DOWN: torch.cat([t[DOWN]] * 2)[:count]}))
    check_refused(folder, "C", DOWN, f"[{count}, 32, 24]", f"num_experts = {EXPERTS}")


@every_layout
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_value_that_is_not_finite(dtype, dialect, tmp_path):
    """At either end and in the middle; of a matrix, a vector, a stack, and what is fp32 always."""
    for name, place, value in (
        (EMBEDDING, 0, float("nan")),
        (DOWN, -1, float("inf")),
        (f"{CCA}.conv_qk_depthwise.bias", 50, -float("inf")),
        (BIASES, 2, float("nan")),
        ("model.norm.weight", -1, float("nan")),
    ):
        folder = make(tmp_path / f"source-{name}", dialect, dtype=dtype)
        bad = stored_names(name, dialect)[-1]
        rewrite(folder, _fill(bad, place, value))
        check_refused(folder, dialect, f"{bad} has values that are not finite")


def _fill(name: str, place: int, value: float) -> Callable[[Tensors], object]:
    return lambda tensors: tensors[name].view(-1)[place].fill_(value)


# Tied embeddings


@every_dialect
def test_a_head_that_contradicts_the_configuration(dialect, tmp_path):
    folder = make(tmp_path / "untied", dialect, tie_word_embeddings=False)
    edit_config(folder, tie_word_embeddings=True)
    check_refused(folder, dialect, HEAD, EMBEDDING, "tie_word_embeddings")
    folder = make(tmp_path / "tied", dialect)
    edit_config(folder, tie_word_embeddings=False)
    check_refused(folder, dialect, f"{HEAD} is missing")


@every_layout
@pytest.mark.parametrize(
    "change",
    [
        lambda t: t + torch.eye(*t.shape) * 1e-6,
        lambda t: t[:-1],
        lambda t: t.bfloat16(),
        lambda t: t.fill_(float("nan")),
    ],
)
def test_a_repeated_head_that_differs(change, dialect, tmp_path):
    folder = make(tmp_path / "source", dialect)
    rewrite(folder, lambda t: t.update({HEAD: change(t[EMBEDDING].clone())}))
    check_refused(folder, dialect, HEAD)


@every_dialect
def test_a_repeated_head_that_is_equal_opens(dialect, tmp_path):
    folder = make(tmp_path / "source", dialect)
    expected = logits(folder)
    rewrite(folder, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    assert torch.equal(logits(folder), expected)
