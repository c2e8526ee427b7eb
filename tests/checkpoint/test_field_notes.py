"""Reports from people who loaded and converted these models: each fault fed in, and what is right.

Numbers are those of the notes. Where a note is about one file, the test is about its kind.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from openzaya.checkpoint import hub
from openzaya.checkpoint.compare import compare, open_for_reading
from openzaya.checkpoint.convert import convert
from openzaya.checkpoint.dialects import config_from_json, describe_folder, write_config
from openzaya.checkpoint.hub import local_folder
from openzaya.checkpoint.load import load_model, read_weights
from openzaya.checkpoint.plan import plan_conversion
from openzaya.checkpoint.tensors import TABLE, parameter_count, tensor_count
from openzaya.checkpoint.weights import CONFIG, WEIGHTS
from openzaya.data.tokenizer import Tokenizer
from openzaya.errors import UserError
from openzaya.model.config import PRESETS
from openzaya.model.state import SequenceState
from tests.checkpoint.checkpoints import (
    BLOCKS,
    DIALECTS,
    EXPERTS,
    SLIDING,
    check_refused,
    edit_config,
    every_dialect,
    legacy,
    logits,
    make,
    read_config_json,
    read_tensors,
    rewrite,
    stored_name,
    stored_names,
)
from tests.checkpoint.legacy import to_legacy
from tests.model.helpers import TOLERANCE, plain_logits, small_model, tokens_for
from tests.oracle import relative_error


def through(source: Path, dialects: str) -> list[Path]:
    """The folders of a chain of conversions."""
    folders = []
    for dialect in dialects:
        target = source.with_name(f"{source.name}{dialect}")
        convert(plan_conversion(source, target, dialect, 20_000, force=True))  # type: ignore[arg-type]
        folders.append(target)
        source = target
    return folders


# 1: a native configuration read by the legacy rules


@every_dialect
def test_note_1_each_dialect_has_its_own_depth(dialect, tmp_path):
    """1: 40 native layers were taken for half-layers, and defaults filled the rest."""
    folder = make(tmp_path / "source", dialect)
    described = describe_folder(folder)
    assert described.dialect == dialect
    assert described.model.num_hidden_layers == 3
    assert read_config_json(folder)["num_hidden_layers"] == (3 if dialect == "C" else 6)


def test_note_1_the_published_sizes():
    for dialect, said in (("A", 80), ("B", 80), ("C", 40)):
        data = write_config(PRESETS["zaya1-8b"], dialect)  # type: ignore[arg-type]
        assert data["num_hidden_layers"] == said
        config = config_from_json(data, "here")
        assert config.num_hidden_layers == 40
        assert tensor_count(config, "native") == 1283
        assert tensor_count(config, "legacy") == 2483


@pytest.mark.parametrize("name", ["norm_epsilon", "num_query_groups", "ffn_hidden_size"])
def test_note_1_legacy_markers_win(name, tmp_path):
    """1: a single one beside native keys makes the whole file legacy, and it must then fit."""
    folder = make(tmp_path / "source", "C")
    value = read_config_json(make(tmp_path / "b", "B"))[name]
    edit_config(folder, **{name: value})
    check_refused(folder, "C", name, "makes this a legacy configuration")
    both = make(tmp_path / "both", "B")
    native = {"moe_intermediate_size": 24, "router_hidden_size": 16, "rms_norm_eps": 1e-5}
    edit_config(both, **native)
    assert describe_folder(both).dialect == "B"
    assert torch.equal(logits(both), logits(make(tmp_path / "b2", "B")))


# 2: a stray key beside nested RoPE settings


@pytest.mark.parametrize("inside", [False, True])
def test_note_2_a_stray_rope_type_is_dropped(inside, tmp_path):
    """2: the published file has it; we read it, and what we write from it is clean."""
    folder = make(tmp_path / "source", "C")
    rope = {**read_config_json(folder)["rope_parameters"], "rope_type": "default"}
    edit_config(folder, **({"rope_parameters": rope} if inside else {"rope_type": "default"}))
    again = through(folder, "BC")[-1]
    data = read_config_json(again)
    assert "rope_type" not in data
    assert data["rope_parameters"].keys() == {"hybrid", "hybrid_sliding"}
    assert torch.equal(logits(again), logits(folder))


@pytest.mark.parametrize("start", ["A", "B", "C"])
def test_note_2_what_we_write_opens_in_transformers(start, tmp_path):
    """2: with all tensors, without warnings about the configuration, and with equal logits."""
    source = make(tmp_path / "source", start)
    folder = through(source, "C" if start != "C" else "BC")[-1]
    theirs, report = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    assert type(theirs).__name__ == "ZayaForCausalLM"
    assert not any(report.values()), report
    ours = load_model(folder)
    biases = {n: t for n, t in ours.state_dict().items() if n.endswith("balancing_biases")}
    theirs.load_state_dict(biases, strict=False)  # it puts the skip class's back to -1
    assert theirs.config.rope_parameters["hybrid"]["rope_theta"] == 100.0
    tokens = tokens_for(ours, 2, 13).clamp_min(1)
    with torch.no_grad():
        actual = theirs(tokens, use_cache=False).logits
    assert relative_error(actual, plain_logits(ours, tokens)) < TOLERANCE


# 3: `rope_scaling: false`, and tokenizers that ask the model's configuration


@pytest.fixture
def with_tokenizer(tmp_path: Path) -> Path:
    """A base-era folder as published: `rope_scaling` false, and no class for its tokenizer."""
    folder = make(tmp_path / "source", "A")
    edit_config(folder, rope_scaling=False)
    Tokenizer.train(["some text to learn from"] * 9, 263).save(folder / "tokenizer.json")
    return folder


@legacy
def test_note_3_false_is_none(dialect, tmp_path):
    folder = make(tmp_path / "source", dialect)
    expected = logits(folder)
    edit_config(folder, rope_scaling=False)
    assert torch.equal(logits(folder), expected)
    assert not read_config_json(through(folder, "C")[0]).get("rope_scaling")


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated")
def test_note_3_a_tokenizer_needs_no_configuration(with_tokenizer):
    """3: the legacy file is rejected elsewhere, but text is encoded here all the same."""
    with pytest.raises(Exception, match=r"rope_parameters.*False"):
        AutoConfig.from_pretrained(with_tokenizer)
    before = Tokenizer.load(with_tokenizer / "tokenizer.json").encode("some text")
    (with_tokenizer / CONFIG).write_text("{")
    assert Tokenizer.load(with_tokenizer / "tokenizer.json").encode("some text") == before


@pytest.mark.parametrize("dialect", ["B", "C"])
def test_note_3_converted_folders_have_a_tokenizer_in_transformers(
    dialect, with_tokenizer, tmp_path
):
    folder = through(with_tokenizer, dialect)[0]
    expected = Tokenizer.load(with_tokenizer / "tokenizer.json").encode("some text")
    assert AutoTokenizer.from_pretrained(folder)("some text")["input_ids"] == expected


# 4: lists of 80 entries under a depth of 120


def test_note_4_lists_collapse_and_the_list_of_layers_has_the_depth(tmp_path):
    """4: the router's width is a list, shorter than `num_hidden_layers` says."""
    folder = make(tmp_path / "source", "A")
    expected = logits(folder)
    edit_config(folder, num_hidden_layers=9)
    config = describe_folder(folder).model
    assert config.router_hidden_size == 16
    assert config.num_hidden_layers == 3
    assert torch.equal(logits(folder), expected)


@pytest.mark.parametrize(
    "name",
    ["cca_num_q_heads", "num_query_groups_list", "ffn_hidden_size_list", "zaya_mlp_expansion"],
)
def test_note_4_lists_whose_entries_differ_do_not_collapse(name, tmp_path):
    folder = make(tmp_path / "source", "A")
    values = read_config_json(folder)[name]
    values[-1] = values[-1] and 2 * values[-1]
    values[-2] = values[-2] and 2 * values[-2]
    edit_config(folder, **{name: values})
    check_refused(folder, "A", name)


# 5: 8 heads under rules by which they are 16


@every_dialect
def test_note_5_both_head_counts_are_named(dialect, tmp_path):
    """5: q was built 2048 wide where the file holds 1024; both numbers are in the message."""
    folder = make(tmp_path / "source", dialect)
    key = "cca_num_q_heads" if dialect == "A" else "num_attention_heads"
    edit_config(folder, **{key: [8, 0] * 3 if dialect == "A" else 8})
    name = stored_name("model.layers.0.self_attn.qkv_proj.q_proj.weight", dialect)
    check_refused(folder, dialect, f"{name} has shape [64, 32], the configuration needs [128, 32]")


def test_note_5_the_uncompressed_count_is_not_the_latent_one():
    """5: in dialect A `num_attention_heads` is 16 where 8 heads are computed with."""
    data = write_config(PRESETS["zaya1-8b"], "A")
    assert data["num_attention_heads"] == 16
    assert config_from_json(data, "here").num_attention_heads == 8
    assert write_config(PRESETS["zaya1-8b"], "B")["num_attention_heads"] == 8


# 6: the published converter on base-era files


def test_note_6_base_era_files_convert_whole(tmp_path):
    """6: the last residual scale went to block 59 of 40, and head count and lists came out raw."""
    model = small_model(7, layer_types=("hybrid",) * 3, sliding_window=None)
    state = model.state_dict()
    base = tmp_path / "base"
    base.mkdir()
    save_file(to_legacy(state, 3), base / WEIGHTS)
    data = {**write_config(model.config, "A"), "num_hidden_layers": 9, "num_attention_heads": 2}
    (base / CONFIG).write_text(json.dumps(data))
    folder = through(base, "C")[0]
    found = read_tensors(folder)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    written = read_config_json(folder)
    assert (written["num_attention_heads"], written["router_hidden_size"]) == (4, 16)
    assert torch.equal(logits(folder), plain_logits(model, tokens_for(model, 2, 13)))


# 7: the dtype of the residual stream


def test_note_7_the_trained_residual_is_recorded_everywhere(tmp_path):
    """7: the native dialect has no word for it, and a converted base silently ran in fp32."""
    source = make(tmp_path / "source", "A", residual_in_fp32=False)
    assert read_config_json(source)["residual_in_fp32"] is False
    for folder in through(source, "CBAC"):
        assert describe_folder(folder).model.residual_in_fp32 is False
        assert load_model(folder, residual="trained").config.residual_in_fp32 is False
        assert load_model(folder).config.residual_in_fp32 is True
    plan = plan_conversion(source, tmp_path / "t", "C", force=True)
    assert any("residual" in note for note in plan.notes)


@every_dialect
def test_note_7_the_user_chooses_parity_or_precision(dialect, tmp_path):
    """7: "trained" rounds the stream in bf16; where products are fp32 there is nothing to round."""
    folder = make(tmp_path / "source", dialect, residual_in_fp32=False)
    always = make(tmp_path / "always", dialect)
    half = torch.bfloat16
    trained = logits(folder, compute_dtype=half, residual="trained")
    precise = logits(folder, compute_dtype=half, residual="float32")
    assert not torch.equal(trained, precise)
    assert torch.equal(precise, logits(always, compute_dtype=half))
    assert torch.equal(logits(always, compute_dtype=half, residual="trained"), precise)
    assert torch.equal(logits(folder, residual="trained"), logits(folder, residual="float32"))


# 8: names that only one direction knows


@pytest.mark.parametrize("row", [row for row in TABLE if row.legacy], ids=lambda row: row.native)
def test_note_8_every_name_goes_there_and_back(row, round_trip):
    """8: after a rename the reverse map wrote names that nobody reads. One table, both ways."""
    first, *middle, last = round_trip
    pattern = re.escape(row.native).replace(r"\{b\}", r"\d+")
    native = [name for name in first if re.fullmatch(pattern, name)]
    later = "router_states_scale" in row.native
    assert len(native) == (1 if "{b}" not in row.native else BLOCKS - later)
    for name in native:
        assert torch.equal(first[name], last[name]), name
        for old in middle:
            parts = [old[part] for part in stored_names(name, "B")]
            assert len(parts) == (EXPERTS if row.stacked else 1)
            assert torch.equal(torch.stack(parts) if row.stacked else parts[0], first[name]), name


@pytest.fixture(scope="module")
def round_trip(tmp_path_factory):
    """Tensors of C, A, B and C again."""
    place = tmp_path_factory.mktemp("round_trip")
    source = make(place / "source", "C", tie_word_embeddings=False)
    return [read_tensors(folder) for folder in (source, *through(source, "ABC"))]


def test_note_8_a_renamed_norm_is_not_replaced_by_ones(tmp_path):
    """8: a lax loader keeps the initial ones where it does not know the name."""
    folder = make(tmp_path / "source", "B")
    old = "model.layers.1.zaya_block.router.rmsnorm_eda.weight"
    new = "model.layers.1.zaya_block.router.router_mlp.norm.weight"
    rewrite(folder, lambda tensors: tensors.update({new: tensors.pop(old)}))
    check_refused(folder, "B", f"{old} is missing", f"{new} is unknown")


# 9: a converter that kept the matrices only


@every_dialect
def test_note_9_nothing_vanishes(dialect, tmp_path):
    """9: norms and stacked experts were gone, in a file that agreed with itself."""
    folder = make(tmp_path / "source", dialect)
    for kept in (2, 3):
        thin = make(tmp_path / f"only-{kept}", dialect)
        rewrite(thin, lambda t, n=kept: [t.pop(name) for name in list(t) if t[name].ndim != n])
        check_refused(thin, dialect, "is missing")
    config, tensors = read_weights(folder)
    parameters = sum(t.numel() for name, t in tensors.items() if "balancing" not in name)
    assert parameters == parameter_count(config)
    stored = sum(t.numel() for t in read_tensors(folder).values())
    for to in DIALECTS:
        target = tmp_path / to
        convert(plan_conversion(folder, target, to, force=True))  # type: ignore[arg-type]
        found = read_tensors(target)
        assert len(found) == tensor_count(config, "native" if to == "C" else "legacy")
        assert sum(t.numel() for t in found.values()) == stored


# 10: guessed layouts, and reads that fail on the way


def test_note_10_sizes_come_from_the_configuration(tmp_path):
    """10: 4096 rows were read as 4096 experts; an embedding too large was passed over."""
    folder = make(tmp_path / "wide", "C")
    down = "model.layers.0.mlp.experts.down_proj"
    rewrite(folder, lambda t: t.update({down: t[down].permute(1, 0, 2)}))
    check_refused(folder, "C", f"{down} has shape [32, 4, 24]", "needs [4, 32, 24]")
    folder = make(tmp_path / "tall", "C")
    name = "model.embed_tokens.weight"
    rewrite(folder, lambda t: t.update({name: torch.cat([t[name]] * 2)}))
    check_refused(folder, "C", f"{name} has shape [122, 32]", "vocab_size = 61")


@every_dialect
def test_note_10_a_read_that_fails_ends_everything(dialect, tmp_path):
    """10: the file ends after it has been planned; nothing is written in place of its data."""
    folder = make(tmp_path / "source", dialect)
    to = "B" if dialect != "B" else "C"
    plan = plan_conversion(folder, tmp_path / "target", to, 20_000, force=True)  # type: ignore[arg-type]
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match="source changed while it was converted"):
        convert(plan)
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


# 12: the scale of router states, absent in block 0 and nowhere else


@every_dialect
@pytest.mark.parametrize("block", [1, 2])
def test_note_12_router_states_are_never_dropped(block, dialect, tmp_path):
    """12: a converter left them out for all blocks because the first has none."""
    folder = make(tmp_path / "source", dialect)
    name = stored_name(f"model.layers.{block}.mlp.gate.router_states_scale", dialect)
    rewrite(folder, lambda tensors: tensors.pop(name))
    check_refused(folder, dialect, f"{name} is missing")


@every_dialect
def test_note_12_the_first_block_has_none(dialect, tmp_path):
    folder = make(tmp_path / "source", dialect)
    name = stored_name("model.layers.0.mlp.gate.router_states_scale", dialect)
    assert name not in read_tensors(folder)
    rewrite(folder, lambda tensors: tensors.update({name: torch.ones(16)}))
    check_refused(folder, dialect, f"{name} is unknown")


def test_note_12_they_matter(tmp_path):
    """12: with the averaging off the logits are others, so no loader may do without."""
    folder = make(tmp_path / "source", "C")
    expected = logits(folder)
    rewrite(folder, lambda t: [x.zero_() for n, x in t.items() if "router_states_scale" in n])
    assert relative_error(logits(folder), expected) > 1e-3


# 13: experts or attention that are not there


@every_dialect
@pytest.mark.parametrize("half", ["self_attn", "experts"])
def test_note_13_missing_halves_are_no_zeros(half, dialect, tmp_path):
    """13: a layer without experts was skipped, and attention without tensors filled with zeros."""
    folder = make(tmp_path / "source", dialect)
    layer = {"C": "1", "self_attn": "2", "experts": "3"}["C" if dialect == "C" else half]
    gone = [n for n in read_tensors(folder) if f"layers.{layer}." in n and f".{half}." in n]
    assert gone
    rewrite(folder, lambda tensors: [tensors.pop(name) for name in gone])
    check_refused(folder, dialect, f"{gone[0]} is missing")


# 14: three-dimensional kernels, and layers without a cache


@every_dialect
def test_note_14_kernels_keep_their_shapes(dialect, tmp_path):
    """14: a generic converter failed on them; they are [channels, inputs per group, taps]."""
    folder = make(tmp_path / "source", dialect, cca_time0=3, cca_time1=4)
    tensors = read_tensors(folder)
    for kernel, shape in (("depthwise", (96, 1, 3)), ("grouped", (96, 16, 4))):
        name = f"model.layers.2.self_attn.qkv_proj.conv_qk_{kernel}.weight"
        assert tensors[stored_name(name, dialect)].shape == shape
    expected = logits(folder)
    for other in through(folder, "ABC"):
        assert torch.equal(logits(other), expected)


def test_note_14_every_layer_of_the_state_can_be_dropped():
    """14: placeholders of expert layers broke at the end of a request; there are none here."""
    model = small_model()
    state = model.new_state(2)
    assert isinstance(state, SequenceState)
    tokens = tokens_for(model, 2, 7)
    with torch.no_grad():
        model(tokens, state=state)
    assert len(state.layers) == model.config.num_hidden_layers


# 15: names that move


@pytest.mark.parametrize("name", ["Zyphra/ZAYA1-8B", "Zyphra/ZAYA1-8B@"])
def test_note_15_a_branch_is_not_opened_by_its_name_alone(name, monkeypatch):
    """15: `main` and `@zaya1` changed their layout under recipes that did not pin them."""

    def ask(repo: str, revision: str) -> None:
        raise OSError("no network in this test")

    monkeypatch.setattr(hub, "_ask", ask)
    with pytest.raises(UserError, match=r"must be pinned.*Zyphra/ZAYA1-8B@REVISION"):
        local_folder(name)


def test_note_15_a_conversion_says_its_layout(tmp_path):
    """15: what is in a folder follows from its own configuration, never from where it came from."""
    for dialect in DIALECTS:
        folder = make(tmp_path / f"misleading-{dialect}-legacy", dialect)
        assert describe_folder(folder).dialect == dialect
    sliding = make(tmp_path / "sliding", "B", layer_types=SLIDING, sliding_window=4)
    assert compare(open_for_reading(sliding), open_for_reading(through(sliding, "C")[0])).equal
