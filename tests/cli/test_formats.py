"""`openzaya convert` and `openzaya verify` as a user runs them, and every verb on every dialect."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from openzaya.checkpoint.atomic import atomic_folder
from openzaya.checkpoint.load import load_model
from openzaya.checkpoint.lora import write_adapter
from openzaya.checkpoint.save import save_model
from openzaya.checkpoint.weights import CONFIG, WEIGHTS
from openzaya.cli.main import main
from openzaya.data.tokenizer import TOKENIZER_FILE, Tokenizer
from openzaya.model.lora import merge, new_adapter
from openzaya.model.model import Zaya
from tests.model.helpers import plain_logits, small_config, tokens_for
from tests.oracle import randomise


@pytest.fixture(scope="module")
def native(tmp_path_factory) -> Path:
    """A checkpoint of dialect C with a tokenizer and a manifest."""
    config = small_config(vocab_size=300, layer_types=("hybrid",) * 3, sliding_window=None)
    model = Zaya(config)
    randomise(model, 2)
    path = tmp_path_factory.mktemp("formats") / "native"
    with atomic_folder(path) as folder:
        save_model(model, folder)
        Tokenizer.train(["the cat and the dog and the bird"] * 9, 270).save(folder / TOKENIZER_FILE)
    return path


@pytest.fixture(scope="module", params=["A", "B", "C"])
def checkpoint(native, request, tmp_path_factory) -> Path:
    """The same in each dialect."""
    target = tmp_path_factory.mktemp("formats") / request.param
    assert main(["convert", str(native), str(target), "--to", request.param, "--force"]) == 0
    return target


def test_every_verb_opens_every_dialect(checkpoint, native, tmp_path, capsys):
    """Oracle: the native original."""
    dialect = checkpoint.name
    capsys.readouterr()
    asked = ["the cat", "--seed", "3", "--max-tokens", "5", "--json"]
    for folder in (native, checkpoint):
        assert main(["generate", str(folder), *asked]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["ids"] == second["ids"]

    assert main(["inspect", str(checkpoint), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["dialect"] == dialect
    assert shown["tensors"]["legacy"] > shown["tensors"]["native"] > 0

    assert main(["verify", str(native), str(checkpoint), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["equal"]
    assert shown["logits"] == [0, 0.0]
    assert [one["dialect"] for one in shown["checkpoints"]] == ["C", dialect]

    assert main(["trace", str(native), "--out", str(tmp_path / "t.safetensors")]) == 0
    assert main(["trace", str(checkpoint), "--compare", str(tmp_path / "t.safetensors")]) == 0
    assert main(["verify", str(checkpoint), "--trace", str(tmp_path / "t.safetensors")]) == 0
    assert "agrees with the trace" in capsys.readouterr().out


RECIPE = """\
name = "tuned"
start_from = "{start}"

[sources.sums]
kind = "bundled"
path = "tinyshakespeare.txt"

[[phases]]
name = "tune"
steps = 3
context = 32
batch_sequences = 2
micro_sequences = 2
lr = 1e-3
lr_final = 1e-4
mixture = {{ sums = 1.0 }}

[run]
compute_dtype = "float32"
eval_every = 0
tensorboard = false
"""


def test_training_goes_on_from_any_dialect(checkpoint, tmp_path, capsys):
    """Weights, tokenizer, RoPE base and longest context are the checkpoint's."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(start=checkpoint))
    assert main(["train", str(recipe), "--out", str(tmp_path / "runs")]) == 0
    run = tmp_path / "runs" / "tuned"
    start = load_model(checkpoint)
    tuned = load_model(run / "checkpoints" / "step-00000003")
    assert tuned.config.max_position_embeddings == start.config.max_position_embeddings
    assert tuned.config.rope_theta == start.config.rope_theta == 100.0
    assert tuned.config.skip_expert == start.config.skip_expert
    tokenizer = Tokenizer.load(run / TOKENIZER_FILE)
    assert tokenizer.digest == Tokenizer.load(checkpoint / TOKENIZER_FILE).digest
    moved = [
        float((tuned.state_dict()[name] - tensor).abs().max())
        for name, tensor in start.state_dict().items()
    ]
    assert 0 < max(moved) < 0.02  # a few small steps away from the start, not a new model
    # The run goes on without what it started from, by its own recipe and by the one it was given.
    checkpoint.rename(checkpoint.with_name("moved"))
    try:
        for again in (run / "recipe.toml", recipe):
            assert main(["train", str(again), "--out", str(tmp_path / "runs")]) == 0
    finally:
        checkpoint.with_name("moved").rename(checkpoint)


def test_training_may_give_the_skip_class_its_native_meaning(checkpoint, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(start=checkpoint))
    out = ["--out", str(tmp_path / "runs")]
    assert main(["train", str(recipe), "model.skip_expert=zero", *out]) == 0
    data = json.loads((tmp_path / "runs/tuned/checkpoints/step-00000003" / CONFIG).read_text())
    assert data["model_type"] == "zaya"


def test_a_recipe_whose_model_is_not_the_checkpoints_is_refused(native, tmp_path, capsys):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(start=native) + '\n[model]\npreset = "tiny"\n')
    assert main(["train", str(recipe), "--out", str(tmp_path / "runs")]) == 2
    assert "hidden_size is 64, not 32" in capsys.readouterr().err


def test_a_start_without_tokenizer_is_refused(native, tmp_path, capsys):
    with atomic_folder(tmp_path / "bare") as folder:
        save_model(load_model(native), folder)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(start=tmp_path / "bare"))
    assert main(["train", str(recipe), "--out", str(tmp_path / "runs")]) == 2
    assert "has no tokenizer.json" in capsys.readouterr().err


def test_convert_says_what_it_did(native, tmp_path, capsys):
    assert main(["convert", str(native), str(tmp_path / "b"), "--to", "b", "--force"]) == 0
    out = capsys.readouterr().out
    assert "99 tensors of dialect C are now 117 of dialect B" in out
    assert "note: tokens can take the skip class" in out
    assert max(len(line) for line in out.splitlines() if "/" not in line) < 250
    command = ["convert", str(tmp_path / "b"), str(tmp_path / "c"), "--to", "C", "--force"]
    assert main([*command, "--shard-size", "40KB", "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["files"] == len(list((tmp_path / "c").glob("*.safetensors"))) > 1
    assert (fields["from"], fields["to"]) == ("B", "C")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "D"], "dialect 'D' is unknown: A"),
        (["--to", "B", "--shard-size", "5 furlongs"], "give a size such as 5GB"),
        (["--to", "B", "--shard-size", "0"], "give a size such as 5GB"),
        (["--to", "B", "--shard-size", "9" * 400 + "GB"], "give a size such as 5GB"),
        (["--to", "B"], "--force writes it all the same"),
        (["--to", "B", "--force", "--adapter", "nowhere"], "nowhere"),
    ],
)
def test_bad_arguments(arguments, message, native, tmp_path, capsys):
    assert main(["convert", str(native), str(tmp_path / "target"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_verify_names_what_differs(native, tmp_path, capsys):
    model = load_model(native)
    with torch.no_grad():
        model.model.layers[1].self_attn.qk_norm.temp.mul_(1.01)
    with atomic_folder(tmp_path / "other") as folder:
        save_model(model, folder)
    assert main(["trace", str(native), "--out", str(tmp_path / "t.safetensors")]) == 0
    assert main(["verify", str(native), str(tmp_path / "other")]) == 1
    out = capsys.readouterr().out
    assert "model.layers.1.self_attn.qk_norm.temp: 100 % of the values differ" in out
    assert "fp32 logits of the probe differ" in out
    assert out.endswith("NOT the same model\n")
    other = str(tmp_path / "other")
    assert main(["verify", other, "--trace", str(tmp_path / "t.safetensors")]) == 1
    assert "parts from the trace first at layers.1.attention.k_normed" in capsys.readouterr().out


def test_verify_one_checkpoint(native, tmp_path, capsys):
    assert main(["verify", str(native)]) == 0
    assert "99 checksums match" in capsys.readouterr().out
    with atomic_folder(tmp_path / "copy") as folder:
        save_model(load_model(native), folder)
    content = bytearray((tmp_path / "copy" / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (tmp_path / "copy" / WEIGHTS).write_bytes(content)
    assert main(["verify", str(tmp_path / "copy")]) == 2
    assert "does not match the manifest (tensor" in capsys.readouterr().err
    with atomic_folder(tmp_path / "more") as folder:
        save_model(load_model(native), folder)
        save_file({"x": torch.ones(9)}, folder / "training.safetensors")
    (tmp_path / "more" / "training.safetensors").write_bytes(b"?" * 136)
    assert main(["verify", str(tmp_path / "more")]) == 2
    assert "training.safetensors" in capsys.readouterr().err
    assert main(["verify", str(native), "--trace", "nowhere"]) == 2
    assert "nowhere: no such file" in capsys.readouterr().err


def test_an_adapter_is_merged_or_kept(native, tmp_path, capsys):
    """Oracle: the adapter merged in memory; kept, merged by convert, and in another dialect."""
    model = load_model(native)
    targets = ("attention", "experts", "router")
    adapter = new_adapter(model.config, targets, rank=2, alpha=4.0, seed=0)
    generator = torch.Generator().manual_seed(1)
    for pair in adapter.pairs.values():
        pair.b.copy_(torch.randn(pair.b.shape, generator=generator) * 0.3)
    write_adapter(adapter, tmp_path / "lora", model.config)
    tokens = tokens_for(model, 2, 13)
    plain = plain_logits(model, tokens)
    merge(model, adapter)
    expected = plain_logits(model, tokens)
    assert not torch.equal(plain, expected)
    for dialect in ("B", "C"):
        target = tmp_path / dialect
        command = ["convert", str(native), str(target), "--to", dialect, "--force"]
        assert main([*command, "--adapter", str(tmp_path / "lora")]) == 0
        assert torch.equal(plain_logits(load_model(target), tokens), expected)
    capsys.readouterr()
    asked = ["the cat", "--seed", "3", "--max-tokens", "5", "--json"]
    kept = ["--adapter", str(tmp_path / "lora")]
    for arguments in ([str(native), *kept], [str(tmp_path / "C")]):
        assert main(["generate", *arguments, *asked]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["ids"] == second["ids"]


def test_the_trained_residual_is_a_choice(native, tmp_path, capsys):
    """It is recorded in every dialect, and computed with only where the user asks."""
    data = json.loads((native / CONFIG).read_text())
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / WEIGHTS).write_bytes((native / WEIGHTS).read_bytes())
    data["openzaya"] = {"residual_in_fp32": False}
    (tmp_path / "source" / CONFIG).write_text(json.dumps(data))
    source = tmp_path / "source"
    for dialect in "ABC":
        target = tmp_path / dialect
        assert main(["convert", str(source), str(target), "--to", dialect, "--force"]) == 0
        source = target
        tokens = torch.arange(3, 16)[None]
        rounded = plain_logits(load_model(target, torch.bfloat16, residual="trained"), tokens)
        precise = plain_logits(load_model(target, torch.bfloat16), tokens)
        assert not torch.equal(rounded, precise)
        full = plain_logits(load_model(target), tokens)
        assert torch.equal(full, plain_logits(load_model(target, residual="trained"), tokens))
        assert (rounded - full).norm() > (precise - full).norm()
    capsys.readouterr()
    assert main(["inspect", str(source)]) == 0
    assert "trained with a residual stream in the compute dtype" in capsys.readouterr().out
