"""Checkpoints in the native dialect, exchanged with `transformers` both ways."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from openzaya.checkpoint.atomic import atomic_folder
from openzaya.checkpoint.dialects import (
    config_from_json,
    differences,
    is_native,
    read_config,
    write_config,
)
from openzaya.checkpoint.load import load_model
from openzaya.checkpoint.manifest import verify
from openzaya.checkpoint.save import save_model
from openzaya.checkpoint.weights import CONFIG, INDEX, WEIGHTS
from openzaya.errors import UserError
from openzaya.model.config import PRESETS
from openzaya.model.model import Zaya
from tests.model.helpers import TOLERANCE, plain_logits, small_config, small_model, tokens_for
from tests.oracle import pair, random_geometry, random_tokens, relative_error


def _greedy(model: Zaya, tokens: torch.Tensor, count: int) -> torch.Tensor:
    state, out, chunk = model.new_state(tokens.shape[0]), [tokens], tokens
    with torch.no_grad():
        for _ in range(count):
            chunk = model.logits(model(chunk, state=state).hidden[:, -1]).argmax(-1, keepdim=True)
            out.append(chunk)
    return torch.cat(out, dim=1)


def _restore_skip_biases(theirs, model: Zaya) -> None:
    """transformers sets the skip class's bias back to -1 after it has read the file."""
    theirs.load_state_dict(
        {name: t for name, t in model.state_dict().items() if "balancing" in name}, strict=False
    )


def _their_greedy(model, tokens: torch.Tensor, count: int) -> torch.Tensor:
    model.generation_config.eos_token_id = None
    return model.generate(tokens, max_new_tokens=count, do_sample=False)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("skip_bias", [-1.0, 0.05])
def test_what_we_write_opens_in_transformers(tied, skip_bias, tmp_path):
    """Oracle: our own logits and tokens, before the file was written.

    A skip bias other than its initial -1 needs one more step there: transformers' `_init_weights`
    overwrites that entry, and that one only, in every model it has just loaded.
    """
    model = small_model(3, tie_word_embeddings=tied, cca_time0=3)
    for block in model.model.layers:
        block.mlp.gate.balancing_biases[-1] = skip_bias
    with atomic_folder(tmp_path / "model") as folder:
        save_model(model, folder)
    assert verify(tmp_path / "model") == []
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", attn_implementation="eager", output_loading_info=True
    )
    assert type(theirs).__name__ == "ZayaForCausalLM"
    assert not any(report.values()), report
    assert theirs.dtype == torch.float32
    if skip_bias != -1:
        _restore_skip_biases(theirs, model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], tensor), name
    tokens = tokens_for(model, 2, 9).clamp_min(1)
    with torch.no_grad():
        actual = theirs(tokens, use_cache=False).logits
    assert relative_error(actual, plain_logits(model, tokens)) < TOLERANCE
    assert torch.equal(_their_greedy(theirs, tokens, 15), _greedy(model, tokens, 15))


@pytest.mark.parametrize("seed", [66, 71, 80])
@pytest.mark.parametrize("shard", ["5GB", "60KB"])
def test_what_transformers_writes_opens_here(seed, shard, tmp_path):
    """Oracle: transformers' logits and tokens, before the file was written."""
    config = random_geometry(seed)
    oracle, _ = pair(config, seed)
    oracle.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / INDEX).exists() == (shard == "60KB")
    ours = load_model(tmp_path)
    assert not ours.training
    tokens = random_tokens(config, 2, 9, seed)
    with torch.no_grad():
        expected = oracle(tokens, use_cache=False).logits
    assert relative_error(plain_logits(ours, tokens), expected) < TOLERANCE
    assert torch.equal(_greedy(ours, tokens, 15), _their_greedy(oracle, tokens, 15))


def test_bf16_files(tmp_path):
    """Oracle: the weights rounded once; balancing biases must survive unrounded."""
    model = small_model(4)
    save_model(model, tmp_path, torch.bfloat16)
    stored = load_file(tmp_path / WEIGHTS)
    for name, tensor in model.state_dict().items():
        if "balancing" in name:
            assert stored[name].dtype == torch.float32
            assert torch.equal(stored[name], tensor)
        else:
            assert stored[name].dtype == torch.bfloat16
            assert torch.equal(stored[name], tensor.bfloat16())
    assert json.loads((tmp_path / CONFIG).read_text())["dtype"] == "bfloat16"
    exact = load_model(tmp_path)
    assert {p.dtype for p in exact.parameters()} == {torch.float32}
    half = load_model(tmp_path, torch.bfloat16)
    assert half.model.layers[0].mlp.gate.balancing_biases.dtype == torch.float32
    assert half.model.layers[0].self_attn.o_proj.weight.dtype == torch.bfloat16
    assert half.model.norm.weight.dtype == torch.float32
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert theirs.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": "standard"},
        {"router": "linear"},
        {"residual": "plain"},
        {"skip_expert": "identity"},
        {"skip_expert": "none"},
    ],
)
def test_other_architectures_are_ours_alone(changes, tmp_path):
    """They round-trip here and do not open as ZAYA1 anywhere else."""
    model = small_model(2, **changes)
    assert not is_native(model.config)
    save_model(model, tmp_path)
    assert read_config(tmp_path) == model.config
    tokens = tokens_for(model, 1, 9)
    assert torch.equal(plain_logits(load_model(tmp_path), tokens), plain_logits(model, tokens))
    assert json.loads((tmp_path / CONFIG).read_text())["model_type"] == "openzaya"
    with pytest.raises(Exception, match="openzaya"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", PRESETS)
def test_configurations_round_trip(name):
    config = PRESETS[name]
    data = json.loads(json.dumps(write_config(config, "C")))
    again = config_from_json(data, "here")
    assert again.types == config.types
    assert again.model_copy(update={"layer_types": config.layer_types}) == config
    extra = {"partial_rotary_factor": 0.25, "rope_theta": 77.0, "sliding_rope_theta": 55.0}
    other = config.model_copy(update=extra)
    again = config_from_json(write_config(other, "C"), "here")
    assert again.model_copy(update={"layer_types": config.layer_types}) == other


def test_stray_rope_type_is_tolerated():
    """As the published configuration has it: nested settings and a stray key beside them."""
    data = write_config(small_config(rope_theta=123.0), "C")
    data["rope_parameters"]["rope_type"] = "default"
    assert config_from_json(data, "here").rope_theta == 123.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "'llama', not 'zaya'"),
        ({"model_type": None}, "None, not 'zaya'"),
        ({"num_experts_per_tok": 2}, "num_experts_per_tok is 2; only 1"),
        (
            {"clamp_temp": True},
            r"clamp_temp is True \(keys times exp of a clamped temperature\); only False",
        ),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"lm_head_bias": True}, "lm_head_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"num_attention_heads": 3}, "does not describe a model.*multiple"),
        ({"hidden_size": None}, "does not describe a model: hidden_size"),
        ({"layer_types": ["hybrid", "mamba", "hybrid"]}, "does not describe a model: layer_types"),
        (
            {"rope_parameters": {"hybrid": {"rope_type": "yarn", "rope_theta": 1e4}}},
            "rope_type 'yarn' of hybrid is not implemented",
        ),
        (
            {
                "rope_parameters": {
                    "hybrid": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
                    "hybrid_sliding": {"rope_theta": 1e4, "partial_rotary_factor": 1.0},
                }
            },
            "disagree about partial_rotary_factor",
        ),
    ],
)
def test_configurations_that_are_refused(changes, message):
    data = {**write_config(small_config(), "C"), **changes}
    with pytest.raises(UserError, match=message) as caught:
        config_from_json(data, "somewhere/config.json")
    assert str(caught.value).startswith("somewhere/config.json")


def test_missing_size_is_named():
    data = write_config(small_config(), "C")
    del data["num_experts"]
    with pytest.raises(UserError, match=r"num_experts: Field required"):
        config_from_json(data, "here")


@pytest.mark.parametrize(
    "rope", [{"rope_theta": 1e6, "rope_type": "default"}, {"full": {"rope_theta": 1e6}}]
)
def test_rope_settings_in_another_form_are_not_replaced_by_defaults(rope):
    """A base that is silently another one spoils every answer and raises nothing."""
    data = {**write_config(small_config(), "C"), "rope_parameters": rope}
    with pytest.raises(UserError, match="rope"):
        config_from_json(data, "here")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "null",
        '"zaya"',
        '{"model_type": "openzaya", "openzaya": []}',
        '{"model_type": "openzaya"}',
        '{"model_type": "zaya", "layer_types": 5}',
        '{"model_type": "zaya", "eos_token_id": []}',
        b"\xff\xfe",
    ],
)
def test_damaged_config_is_a_readable_error(text, tmp_path):
    (tmp_path / CONFIG).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=CONFIG):
        read_config(tmp_path)


# Weights that do not fit


@pytest.fixture
def saved(tmp_path) -> Path:
    save_model(small_model(1), tmp_path)
    return tmp_path


def _rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


NAME = "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NAME), f"{NAME} is missing"),
        (lambda t: t.pop("model.layers.1.mlp.gate.router_states_scale"), "router_states_scale is"),
        (lambda t: t.pop("model.layers.0.mlp.gate.balancing_biases"), "balancing_biases is miss"),
        (lambda t: t.update(extra=torch.zeros(1)), "extra is unknown"),
        (
            lambda t: t.update({NAME: t[NAME][:, :, :-1].contiguous()}),
            rf"{NAME} has shape \[4, 32, 23\], the configuration needs \[4, 32, 24\]",
        ),
        (lambda t: t[NAME].view(-1)[7:8].fill_(float("nan")), f"{NAME} has values that are not"),
        (lambda t: t[NAME].view(-1)[7:8].fill_(float("inf")), f"{NAME} has values that are not"),
    ],
)
def test_tensors_that_do_not_match(change, message, saved):
    """Nothing is filled in and nothing is left out without a word."""
    _rewrite(saved, change)
    with pytest.raises(UserError, match=message):
        load_model(saved)


def test_many_problems_are_cut_short(saved):
    _rewrite(saved, lambda t: [t.pop(name) for name in list(t)[:20]])
    with pytest.raises(UserError, match=r"and 15 more") as caught:
        load_model(saved)
    assert len(str(caught.value)) < 1000


def test_tied_head_that_is_stored_again(saved):
    """Some writers repeat the tied weight; that alone is no reason to refuse."""
    expected = load_model(saved).state_dict()
    _rewrite(saved, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert load_model(saved).state_dict().keys() == expected.keys()


def test_tied_head_that_differs_is_refused(saved):
    """The file and its configuration contradict each other; dropping the head hides it."""
    _rewrite(saved, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(UserError, match="lm_head"):
        load_model(saved)


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_truncated_weights(saved, keep):
    content = (saved / WEIGHTS).read_bytes()
    (saved / WEIGHTS).write_bytes(content[:keep])
    with pytest.raises(UserError, match="damaged"):
        load_model(saved)


def test_missing_files(saved):
    (saved / WEIGHTS).unlink()
    with pytest.raises(UserError, match=f"{WEIGHTS} is missing"):
        load_model(saved)
    (saved / CONFIG).unlink()
    with pytest.raises(UserError, match=f"no {CONFIG}"):
        load_model(saved)
    with pytest.raises(UserError, match="is no checkpoint"):
        load_model(saved / "absent")


def test_missing_shard(tmp_path):
    oracle, _ = pair(random_geometry(66), 66)
    oracle.save_pretrained(tmp_path, max_shard_size="60KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    with pytest.raises(UserError, match=f"{shards[1].name} is missing"):
        load_model(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_damaged_index_is_a_readable_error(text, saved):
    (saved / WEIGHTS).unlink()
    (saved / INDEX).write_text(text)
    with pytest.raises(UserError, match=INDEX):
        load_model(saved)


def test_loaded_weights_can_be_trained_and_leave_the_file_alone(saved):
    before = (saved / WEIGHTS).read_bytes()
    model = load_model(saved)
    assert all(p.requires_grad for p in model.parameters())
    assert not any(t.is_meta for t in model.state_dict().values())
    tokens = tokens_for(model, 1, 8)
    model.loss(model(tokens[:, :-1]).hidden, tokens[:, 1:]).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    assert (saved / WEIGHTS).read_bytes() == before


def test_a_manifest_vouches_for_every_tensor_or_for_none(tmp_path):
    """One that leaves a tensor out would let it be changed unnoticed."""
    with atomic_folder(tmp_path / "model") as folder:
        save_model(small_model(1), folder)
    file = tmp_path / "model" / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["files"][WEIGHTS]["tensors"]["model.norm.weight"]
    file.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"model\.norm\.weight is in only one of the two"):
        load_model(tmp_path / "model")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"rms_norm_eps": Infinity', "rms_norm_eps"),
        ('"num_experts": 4, "num_experts": 8', "num_experts is in it twice"),
        ('"num_hidden_layers": 1000000000', "num_hidden_layers"),
    ],
)
def test_settings_that_make_no_sense(text, message, saved):
    data = json.loads((saved / CONFIG).read_text())
    for name in ("rms_norm_eps", "num_experts", "num_hidden_layers"):
        data.pop(name) if name in text else None
    (saved / CONFIG).write_text(json.dumps(data)[:-1] + ", " + text + "}")
    with pytest.raises(UserError, match=message):
        load_model(saved)


def test_a_depth_that_is_absurd_is_refused_at_once(saved):
    data = {**json.loads((saved / CONFIG).read_text()), "num_hidden_layers": 9_999}
    del data["layer_types"]
    (saved / CONFIG).write_text(json.dumps(data))
    with pytest.raises(UserError, match="has 9999 layers, the tensors are of 3"):
        load_model(saved)


def test_float16_is_no_compute_dtype(saved):
    with pytest.raises(ValueError, match="too small a range"):
        load_model(saved, torch.float16)


def test_how_layer_types_are_spelled_is_no_difference():
    """Nor are settings of sliding layers where there are none."""
    config = PRESETS["tiny"]
    spelled = {"layer_types": ("hybrid", "hybrid"), "sliding_rope_theta": 5.0}
    assert differences(config, config.model_copy(update=spelled)) == {}
    other = config.model_copy(update={"rope_theta": 5.0})
    assert differences(config, other) == {"rope_theta": (config.rope_theta, 5.0)}


def test_another_meaning_of_the_skip_class_on_the_same_tensors(tmp_path):
    """Oracle: a model of that meaning with these tensors."""
    model = small_model(3, skip_expert="identity")
    save_model(model, tmp_path)
    zero = small_config()
    expected = Zaya(zero)
    expected.load_state_dict(model.state_dict())
    tokens = tokens_for(model, 2, 9)
    opened = load_model(tmp_path, config=zero)
    assert opened.config == zero
    assert torch.equal(plain_logits(opened, tokens), plain_logits(expected, tokens))
    assert not torch.equal(plain_logits(opened, tokens), plain_logits(model, tokens))
