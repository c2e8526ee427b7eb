"""Conversion: bit for bit, all or nothing, and resumed where it stopped."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from openzaya.checkpoint import plan as module
from openzaya.checkpoint.atomic import write_text
from openzaya.checkpoint.convert import convert
from openzaya.checkpoint.dialects import describe_folder, write_config
from openzaya.checkpoint.load import load_model
from openzaya.checkpoint.lora import write_adapter
from openzaya.checkpoint.manifest import record, verify
from openzaya.checkpoint.plan import plan_conversion
from openzaya.checkpoint.save import save_model
from openzaya.checkpoint.weights import CONFIG, INDEX, WEIGHTS
from openzaya.data.tokenizer import Tokenizer
from openzaya.errors import UserError
from openzaya.model.lora import attach, new_adapter
from tests.checkpoint.legacy import to_legacy
from tests.model.helpers import TOLERANCE, plain_logits, small_model, tokens_for
from tests.oracle import relative_error

FULL = ("hybrid",) * 3
SLIDING = ("hybrid_sliding", "hybrid", "hybrid_sliding")


def native(folder: Path, types=FULL, dtype=None, **changes):
    """A native checkpoint with every parameter random, and its model as it reads it."""
    window = 4 if "hybrid_sliding" in types else None
    model = small_model(5, layer_types=types, sliding_window=window, **changes)
    folder.mkdir(parents=True)
    save_model(model, folder, dtype)
    return load_model(folder)


def through(source: Path, dialects: str, shard_bytes: int = 20_000, force: bool = True) -> Path:
    """Convert again and again; returns the last folder."""
    for number, dialect in enumerate(dialects):
        target = source.with_name(f"{source.name}-{number}{dialect}")
        convert(plan_conversion(source, target, dialect, shard_bytes, force))  # type: ignore[arg-type]
        source = target
    return source


def contents(folder: Path) -> dict[str, str]:
    return {file.name: record(file).sha256 for file in folder.iterdir()}


def logits(folder: Path) -> torch.Tensor:
    model = load_model(folder)
    return plain_logits(model, tokens_for(model, 2, 13))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chain", ["ACBA", "BCB", "CAC", "CBC", "AC", "AB"])
def test_round_trips_are_bit_identical(chain, tied, dtype, tmp_path):
    """Oracle: the folder before, every file of it, and its fp32 logits."""
    model = native(tmp_path / "source", dtype=dtype, tie_word_embeddings=tied)
    expected = plain_logits(model, tokens_for(model, 2, 13))
    start = through(tmp_path / "source", chain[0])
    assert torch.equal(logits(start), expected)
    folder = start
    for dialect in chain[1:]:
        folder = through(folder, dialect)
        assert describe_folder(folder).dialect == dialect
        assert verify(folder) == []
        assert torch.equal(logits(folder), expected)
    if chain[0] == chain[-1]:
        assert contents(folder) == contents(start)


@pytest.mark.parametrize("chain", ["BCB", "CBC"])
def test_sliding_layers_round_trip(chain, tmp_path):
    """The window changes by one between the dialects, and what attention sees does not."""
    model = native(tmp_path / "source", SLIDING)
    start = through(tmp_path / "source", chain[0])
    end = through(start, chain[1:])
    assert contents(end) == contents(start)
    expected = plain_logits(model, tokens_for(model, 2, 13))
    for folder in tmp_path.iterdir():
        assert torch.equal(logits(folder), expected)
    name = "source-0B" if chain == "BCB" else "source-0C-0B"
    old = json.loads((tmp_path / name / CONFIG).read_text())
    assert old["swa_layers"] == [3, 0, 0, 0, 3, 0]
    assert old["swa_rotary_base"] == 30.0
    assert describe_folder(end).model.sliding_window == 4


def test_the_74b_configuration_both_ways():
    """Oracle: the published values: half the layers slide, 4096 without the query, 24 experts."""
    from openzaya.checkpoint.dialects import config_from_json
    from openzaya.model.config import PRESETS

    old = write_config(PRESETS["zaya1-74b"], "B")
    assert old["num_hidden_layers"] == 120
    assert old["swa_layers"] == [4096, 0, 0, 0] * 30
    assert (old["num_experts"], old["ffn_hidden_size"]) == (24, 8192)
    config = config_from_json(old, "here")
    assert config.sliding_window == 4097
    assert config.types == ("hybrid_sliding", "hybrid") * 30
    assert config.model_copy(update={"skip_expert": "zero"}) == PRESETS["zaya1-74b"]


def test_dialect_a_cannot_slide(tmp_path):
    native(tmp_path / "source", SLIDING)
    with pytest.raises(UserError, match="dialect A has no words for sliding layers"):
        plan_conversion(tmp_path / "source", tmp_path / "a", "A", force=True)


@pytest.mark.parametrize("dialect", ["A", "B"])
def test_what_we_write_is_the_legacy_layout(dialect, tmp_path):
    """Oracle: the mapping by hand in `legacy.py`."""
    model = native(tmp_path / "source")
    folder = through(tmp_path / "source", dialect, shard_bytes=10**9)
    ours = load_file(folder / WEIGHTS)
    by_hand = to_legacy(model.state_dict(), 3)
    assert ours.keys() == by_hand.keys()
    assert all(torch.equal(ours[name], by_hand[name]) for name in ours)


def test_what_we_convert_opens_in_transformers(tmp_path):
    """Oracle: transformers' logits of a legacy checkpoint that was made by hand."""
    model = native(tmp_path / "source", tie_word_embeddings=False)
    for block in model.model.layers:
        block.mlp.gate.balancing_biases[-1] = -1.0  # transformers sets it so, and nothing skips
    legacy = tmp_path / "legacy"
    legacy.mkdir()
    save_file(to_legacy(model.state_dict(), 3), legacy / WEIGHTS)
    (legacy / CONFIG).write_text(json.dumps(write_config(model.config, "B")))
    convert(plan_conversion(legacy, tmp_path / "c", "C", shard_bytes=50_000))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "c", attn_implementation="eager")
    tokens = tokens_for(model, 2, 13)
    with torch.no_grad():
        actual = theirs(tokens, use_cache=False).logits
    assert relative_error(actual, plain_logits(model, tokens)) < TOLERANCE


# All or nothing


def test_a_killed_conversion_leaves_nothing_that_opens_and_is_resumed(tmp_path):
    """A process that is killed outright, half-way; the next one takes finished shards over."""
    native(tmp_path / "source")
    target = tmp_path / "target"
    size = plan_conversion(tmp_path / "source", target, "B", 20_000, True).nbytes
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from openzaya.checkpoint.convert import convert\n"
        "from openzaya.checkpoint.plan import plan_conversion\n"
        "done = 0\n"
        "def progress(count):\n"
        "    global done\n"
        "    done += count\n"
        f"    if done > {size // 2}: os.kill(os.getpid(), signal.SIGKILL)\n"
        "plan = plan_conversion(Path(sys.argv[1]), Path(sys.argv[2]), 'B', 20_000, True)\n"
        "convert(plan, progress)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "source"), str(target)]
    done = subprocess.run(command, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == -signal.SIGKILL
    assert not target.exists()
    scratch = tmp_path / ".target.converting"
    assert list(scratch.glob("*.safetensors"))
    with pytest.raises(UserError, match="no config"):
        load_model(scratch)
    counts: list[int] = []
    plan = plan_conversion(tmp_path / "source", target, "B", 20_000, True)
    kept = convert(plan, counts.append)
    assert kept > 0
    assert sum(counts) == size
    assert contents(target) == contents(through(tmp_path / "source", "B"))
    assert {path.name for path in tmp_path.iterdir()} == {"source", "target", "source-0B"}


def _stop_after(plan, error: BaseException) -> None:
    """Run a conversion that fails at half its bytes."""
    done = 0

    def progress(count: int) -> None:
        nonlocal done
        done += count
        if done > plan.nbytes // 2:
            raise error

    with pytest.raises((UserError, KeyboardInterrupt)):
        convert(plan, progress)


def test_an_interrupted_conversion_is_not_resumed_from_another_source(tmp_path):
    native(tmp_path / "source")
    plan = plan_conversion(tmp_path / "source", tmp_path / "t", "B", 20_000, True)
    _stop_after(plan, KeyboardInterrupt())
    tensors = load_file(tmp_path / "source" / WEIGHTS)
    tensors["model.norm.weight"] += 1
    save_file(tensors, tmp_path / "source" / WEIGHTS)
    again = plan_conversion(tmp_path / "source", tmp_path / "t", "B", 20_000, True)
    assert convert(again) == 0
    assert torch.equal(logits(tmp_path / "t"), logits(tmp_path / "source"))


def test_a_shard_that_was_damaged_meanwhile_is_written_again(tmp_path):
    native(tmp_path / "source")
    plan = plan_conversion(tmp_path / "source", tmp_path / "t", "B", 20_000, True)
    _stop_after(plan, KeyboardInterrupt())
    first = tmp_path / ".t.converting" / plan.shards[0].name
    content = bytearray(first.read_bytes())
    content[-1] ^= 1
    first.write_bytes(content)
    convert(plan_conversion(tmp_path / "source", tmp_path / "t", "B", 20_000, True))
    assert verify(tmp_path / "t") == []
    assert torch.equal(logits(tmp_path / "t"), logits(tmp_path / "source"))


def test_a_full_disk_is_one_message_and_loses_nothing(tmp_path):
    native(tmp_path / "source")
    plan = plan_conversion(tmp_path / "source", tmp_path / "t", "B", 20_000, True)
    _stop_after(plan, OSError(errno.ENOSPC, "No space left on device"))
    assert not (tmp_path / "t").exists()
    assert convert(plan_conversion(tmp_path / "source", tmp_path / "t", "B", 20_000, True)) > 0


def test_too_little_room_is_said_before_anything_is_written(tmp_path, monkeypatch):
    native(tmp_path / "source")
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 9))
    with pytest.raises(UserError, match="0 MB free, the result needs"):
        plan_conversion(tmp_path / "source", tmp_path / "t", "B", force=True)
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_a_bad_number_on_the_way_leaves_nothing(tmp_path):
    native(tmp_path / "source")
    tensors = load_file(tmp_path / "source" / WEIGHTS)
    tensors["model.norm.weight"][3] = float("nan")  # of the last shard
    save_file(tensors, tmp_path / "source" / WEIGHTS)
    plan = plan_conversion(tmp_path / "source", tmp_path / "t", "B", 20_000, True)
    with pytest.raises(UserError, match=r"model\.norm\.weight has values that are not finite"):
        convert(plan)
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_only_one_process_converts_to_a_folder(tmp_path):
    """The second is refused, and the first goes on undisturbed."""
    native(tmp_path / "source")
    plan = plan_conversion(tmp_path / "source", tmp_path / "t", "B", 20_000, True)
    refused = []

    def progress(count: int) -> None:
        if count and not refused:
            with pytest.raises(UserError, match="another process is writing") as caught:
                convert(plan_conversion(tmp_path / "source", tmp_path / "t", "B", 20_000, True))
            refused.append(caught)

    convert(plan, progress)
    assert refused
    assert verify(tmp_path / "t") == []


@pytest.mark.parametrize("target", ["there", "source", "source/inside"])
def test_targets_that_are_refused(target, tmp_path):
    native(tmp_path / "source")
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match=r"exists already|lies inside the source"):
        plan_conversion(tmp_path / "source", tmp_path / target, "B", force=True)


def test_memory_does_not_grow_with_the_checkpoint(tmp_path):
    """A process that converts 400 MB needs no more than one that converts next to nothing."""
    from openzaya.checkpoint.headers import write_header
    from openzaya.checkpoint.tensors import entries
    from tests.model.helpers import small_config

    def make(name: str, inner: int) -> Path:
        config = small_config(layer_types=FULL, sliding_window=None, moe_intermediate_size=inner)
        folder = tmp_path / name
        folder.mkdir()
        header, spans = write_header({e.native: ("F32", e.shape) for e in entries(config)})
        with (folder / WEIGHTS).open("wb") as file:
            file.write(header)
            file.truncate(max(span.end for span in spans.values()))
        (folder / CONFIG).write_text(json.dumps(write_config(config, "C")))
        return folder

    def peak(folder: Path) -> int:
        code = (
            "import resource, sys\n"
            "from pathlib import Path\n"
            "from openzaya.checkpoint.convert import convert\n"
            "from openzaya.checkpoint.plan import plan_conversion\n"
            "convert(plan_conversion(Path(sys.argv[1]), Path(sys.argv[2]), 'B', 10**8, True))\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
        )
        command = [sys.executable, "-c", code, str(folder), f"{folder}-B"]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    small, large = peak(make("small", 24)), peak(make("large", 87_000))
    assert (tmp_path / "large" / WEIGHTS).stat().st_size > 400e6
    assert large - small < 64 * 1024  # KiB


# Skip class


def test_a_skip_class_that_fires_is_not_given_another_meaning(tmp_path):
    native(tmp_path / "source")
    with pytest.raises(UserError, match=r"take the skip class .*'zero'.*'identity'.*--force"):
        plan_conversion(tmp_path / "source", tmp_path / "b", "B")
    forced = through(tmp_path / "source", "B")
    data = json.loads((forced / CONFIG).read_text())
    assert data["openzaya"] == {"skip_expert": "zero"}
    assert describe_folder(forced).model.skip_expert == "zero"


def test_a_legacy_skip_class_that_fires_means_identity(tmp_path):
    """Opened directly it is what its training computed; converted by force it stays that here."""
    model = native(tmp_path / "source")
    legacy = tmp_path / "legacy"
    legacy.mkdir()
    save_file(to_legacy(model.state_dict(), 3), legacy / WEIGHTS)
    (legacy / CONFIG).write_text(
        json.dumps(write_config(model.config.model_copy(update={"skip_expert": "identity"}), "B"))
    )
    assert "openzaya" not in json.loads((legacy / CONFIG).read_text())
    opened = load_model(legacy)
    assert opened.config.skip_expert == "identity"
    tokens = tokens_for(model, 2, 13)
    assert not torch.equal(plain_logits(opened, tokens), plain_logits(model, tokens))
    with pytest.raises(UserError, match=r"'identity', but readers of dialect C take as 'zero'"):
        plan_conversion(legacy, tmp_path / "c", "C")
    forced = through(legacy, "C")
    assert torch.equal(logits(forced), plain_logits(opened, tokens))


def test_a_skip_class_that_cannot_fire_is_no_obstacle(tmp_path):
    """With bias -1 and an expert's bias of at least 0 no probability is large enough."""
    model = native(tmp_path / "source")
    for block in model.model.layers:
        block.mlp.gate.balancing_biases[-1] = -1.0
        block.mlp.gate.balancing_biases[0] = 0.0
    shutil.rmtree(tmp_path / "source")
    (tmp_path / "source").mkdir()
    save_model(model, tmp_path / "source")
    folder = through(tmp_path / "source", "BC", force=False)
    assert "openzaya" not in json.loads((folder / CONFIG).read_text())
    assert torch.equal(logits(folder), logits(tmp_path / "source"))


def test_a_model_of_ours_alone_has_no_dialect(tmp_path):
    model = small_model(5, router="linear")
    (tmp_path / "source").mkdir()
    save_model(model, tmp_path / "source")
    with pytest.raises(UserError, match="dialect C has no words for this model"):
        plan_conversion(tmp_path / "source", tmp_path / "c", "C", force=True)


def test_our_own_identity_models_export_to_legacy(tmp_path):
    model = small_model(5, skip_expert="identity", layer_types=FULL, sliding_window=None)
    (tmp_path / "source").mkdir()
    save_model(model, tmp_path / "source")
    folder = through(tmp_path / "source", "A", force=False)
    assert torch.equal(logits(folder), plain_logits(model, tokens_for(model, 2, 13)))


# What travels along


@pytest.fixture
def with_companions(tmp_path) -> Path:
    native(tmp_path / "source")
    source = tmp_path / "source"
    Tokenizer.train(["some text to learn from"] * 9, 263).save(source / "tokenizer.json")
    published = {"top_p": 0.95, "top_k": -1, "do_sample": False, "temperature": 1.0}
    (source / "generation_config.json").write_text(json.dumps(published))
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "LICENSE").write_text("Apache-2.0")
    (source / "optimizer.pt").write_bytes(b"\x80")
    return source


def test_companions_are_valid_for_the_target(with_companions, tmp_path):
    """Oracle: transformers, which refuses the published generation settings."""
    plan = plan_conversion(with_companions, tmp_path / "a", "A", force=True)
    assert plan.companions.left_out == ["optimizer.pt"]
    convert(plan)
    folder = tmp_path / "a"
    GenerationConfig.from_pretrained(folder).validate(strict=True)
    settings = json.loads((folder / "generation_config.json").read_text())
    assert settings == {
        "top_p": 0.95,
        "top_k": 0,
        "do_sample": True,
        "temperature": 1.0,
        "eos_token_id": 1,
    }
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (folder / "LICENSE").exists()
    assert not (folder / "optimizer.pt").exists()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = Tokenizer.load(folder / "tokenizer.json").encode("some text")
    assert tokenizer("some text")["input_ids"] == ids
    assert verify(folder) == []


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["{", "[]"])
def test_damaged_companions_are_named(name, content, with_companions, tmp_path):
    (with_companions / name).write_text(content)
    with pytest.raises(UserError, match=name):
        plan_conversion(with_companions, tmp_path / "a", "A", force=True)
    assert not (tmp_path / "a").exists()


def test_several_end_tokens_survive(tmp_path):
    native(tmp_path / "source")
    file = tmp_path / "source" / CONFIG
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": [1, 7]}))
    folder = through(tmp_path / "source", "BCAC")
    assert json.loads((folder / CONFIG).read_text())["eos_token_id"] == [1, 7]


def test_shards_hold_whole_tensors_and_are_indexed(tmp_path):
    native(tmp_path / "source")
    folder = through(tmp_path / "source", "B", shard_bytes=20_000)
    index = json.loads((folder / INDEX).read_text())
    stored = {}
    for file in folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            assert index["weight_map"][name] == file.name
            stored[name] = tensor
    assert index["weight_map"].keys() == stored.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored.values())
    assert len(list(folder.glob("*.safetensors"))) > 3
    single = through(tmp_path / "source", "C", shard_bytes=10**9)
    assert not (single / INDEX).exists()
    assert (single / WEIGHTS).exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("special_tokens_map.json", "{"),
        ("chat_template.jinja", b"\xff\xfe"),
        ("generation_config.json", '{"top_k": "x"}'),
        ("generation_config.json", '{"temperature": -5}'),
        ("generation_config.json", '{"top_p": 0}'),
        ("tokenizer_config.json", '{"tokenizer_class": 5}'),
        ("tokenizer.json", "{}"),
    ],
)
def test_companions_that_no_reader_can_use_are_refused(name, content, with_companions, tmp_path):
    raw = content if isinstance(content, bytes) else content.encode()
    (with_companions / name).write_bytes(raw)
    with pytest.raises(UserError, match=name):
        plan_conversion(with_companions, tmp_path / "a", "A", force=True)


# Ways in which it once broke


def test_a_source_where_the_target_would_grow_is_left_alone(tmp_path):
    """A finished but not renamed conversion looks like a checkpoint; converting it deleted it."""
    native(tmp_path / ".t.converting")
    with pytest.raises(UserError, match=r"is where .* would grow"):
        plan_conversion(tmp_path / ".t.converting", tmp_path / "t", "C")
    assert logits(tmp_path / ".t.converting") is not None


def test_files_that_no_conversion_wrote_are_not_removed(tmp_path):
    native(tmp_path / "source")
    (tmp_path / ".t.converting").mkdir()
    (tmp_path / ".t.converting" / "thesis.txt").write_text("the only copy")
    plan = plan_conversion(tmp_path / "source", tmp_path / "t", "B", force=True)
    with pytest.raises(UserError, match=r"thesis\.txt, which no conversion wrote"):
        convert(plan)
    assert (tmp_path / ".t.converting" / "thesis.txt").exists()


def test_a_source_that_changes_meanwhile_gives_no_mixture(tmp_path):
    """Neither in one go, nor by taking over shards of what was there before."""
    native(tmp_path / "source")
    other = small_model(6, layer_types=FULL, sliding_window=None)
    changes = []

    def change(count: int) -> None:
        if count and not changes:
            changes.append(count)
            save_model(other, tmp_path / "source")

    plan = plan_conversion(tmp_path / "source", tmp_path / "t", "B", 20_000, True)
    with pytest.raises(UserError, match="source changed while it was converted"):
        convert(plan, change)
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_a_full_disk_at_the_journal_keeps_finished_shards(tmp_path, monkeypatch):
    native(tmp_path / "source")
    calls = []

    def full(path, text):
        calls.append(path)
        if len(calls) == 4:
            raise UserError("cannot write") from OSError(errno.ENOSPC, "No space left on device")
        write_text(path, text)

    monkeypatch.setattr("openzaya.checkpoint.convert.write_text", full)
    plan = plan_conversion(tmp_path / "source", tmp_path / "t", "B", 20_000, True)
    with pytest.raises(UserError, match=r"No space left .* the same command goes on"):
        convert(plan)
    monkeypatch.undo()
    assert convert(plan_conversion(tmp_path / "source", tmp_path / "t", "B", 20_000, True)) > 0


def test_a_place_that_cannot_be_written_is_not_called_full(tmp_path):
    native(tmp_path / "source")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Choose a place that can be written") as caught:
        convert(plan_conversion(tmp_path / "source", tmp_path / "file" / "t", "B", force=True))
    assert "free room" not in str(caught.value)


def test_a_target_that_another_process_has_finished_meanwhile(tmp_path):
    native(tmp_path / "source")
    late = plan_conversion(tmp_path / "source", tmp_path / "t", "B", force=True)
    convert(plan_conversion(tmp_path / "source", tmp_path / "t", "B", force=True))
    with pytest.raises(UserError, match="exists already"):
        convert(late)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "t"}
    assert verify(tmp_path / "t") == []


@pytest.mark.parametrize("target", ["link", "new/.."])
def test_targets_that_only_the_last_step_would_have_refused(target, tmp_path):
    native(tmp_path / "source")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"exists already|does not name a new folder"):
        plan_conversion(tmp_path / "source", tmp_path / target, "B", force=True)


def test_another_conversion_that_was_begun_is_mentioned(tmp_path):
    native(tmp_path / "source")
    _stop_after(
        plan_conversion(tmp_path / "source", tmp_path / "t", "A", 20_000, True), KeyboardInterrupt()
    )
    plan = plan_conversion(tmp_path / "source", tmp_path / "t", "B", 20_000, True)
    assert convert(plan) == 0
    assert any("something else was replaced" in note for note in plan.notes)


def test_merged_router_matrices_stay_fp32(tmp_path):
    """They are computed with in fp32, so merging must not round them where keeping does not."""
    native(tmp_path / "source", dtype=torch.bfloat16)
    model = load_model(tmp_path / "source")
    adapter = new_adapter(model.config, ("router",), rank=2, alpha=4.0, seed=0)
    for pair in adapter.pairs.values():
        pair.b.normal_(generator=torch.Generator().manual_seed(1))
    write_adapter(adapter, tmp_path / "lora", model.config)
    plan = plan_conversion(
        tmp_path / "source", tmp_path / "t", "B", 20_000, True, tmp_path / "lora"
    )
    convert(plan)
    attach(model, adapter)
    assert torch.equal(logits(tmp_path / "t"), plain_logits(model, tokens_for(model, 2, 13)))


def test_a_merge_that_overflows_names_the_merge(tmp_path):
    native(tmp_path / "source", dtype=torch.float16)
    model = load_model(tmp_path / "source")
    adapter = new_adapter(model.config, ("attention",), rank=1, alpha=1.0, seed=0)
    for pair in adapter.pairs.values():
        pair.b.fill_(1e6)
    write_adapter(adapter, tmp_path / "lora", model.config)
    plan = plan_conversion(tmp_path / "source", tmp_path / "t", "B", 10**9, True, tmp_path / "lora")
    with pytest.raises(UserError, match=r"with the adapter merged, .* F16 cannot hold"):
        convert(plan)
