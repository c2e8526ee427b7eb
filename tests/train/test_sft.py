"""From a checkpoint to one that is tuned: on chats, by all weights or by an adapter."""

from __future__ import annotations

import json
import shutil
import signal
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from openzaya.checkpoint.load import load_model, read_tensors
from openzaya.checkpoint.lora import read_adapter
from openzaya.checkpoint.run import find_adapter, find_checkpoint
from openzaya.checkpoint.save import save_model
from openzaya.cli import main as cli
from openzaya.config.load import load_recipe
from openzaya.data.chat import encode_chat
from openzaya.data.conversations import ChatEncoder, Conversation
from openzaya.data.template import read_template
from openzaya.errors import UserError
from openzaya.model.lora import attach, new_adapter
from openzaya.serve.chat_format import NativeFormat, TemplateFormat, Turn
from openzaya.serve.loading import open_chat_format, open_checkpoint, open_folder
from openzaya.train import adapter as adapters
from openzaya.train import trainer
from openzaya.train.metrics import read_metrics
from openzaya.train.setup import architecture_of
from openzaya.train.stop import Stopped
from openzaya.train.trainer import train
from tests.data.test_conversations import FORGETFUL
from tests.train.test_trainer import assert_same_tensors, curve

TALK = [
    {"role": "user", "content": "the quick brown fox"},
    {"role": "assistant", "content": "<think>\na dog\n</think>\njumps over"},
    {"role": "user", "content": "and then?"},
    {"role": "assistant", "content": "sleeps a while"},
]
SHORT = [
    "phases.tune.steps=4",
    "phases.tune.context=256",
    "phases.tune.batch_sequences=4",
    "phases.tune.micro_sequences=2",
    "phases.tune.warmup_steps=1",
    "phases.tune.lr=1e-2",
    "run.checkpoint_every=2",
    "run.eval_every=4",
    "run.eval_sequences=2",
    "run.keep_checkpoints=9",
    "run.tensorboard=false",
    "run.threads=1",
    "sources.mine.heldout=0.2",
]


@pytest.fixture(scope="module")
def base(tmp_path_factory, quiet):
    """A run from scratch, and a file of chats."""
    out = tmp_path_factory.mktemp("base")
    text = "\n\n".join("the quick brown fox jumps " * n for n in range(1, 40))
    (out / "text.txt").write_text(text)
    first = [
        "phases.text.steps=3",
        "phases.text.context=32",
        "phases.text.warmup_steps=1",
        "phases.reason.steps=2",
        "phases.reason.context=256",
        "run.eval_every=0",
        "run.tensorboard=false",
        "run.threads=1",
        "sources.plays.kind=text",
        f"sources.plays.path={out / 'text.txt'}",
        'sources.plays.separator="\\n\\n"',
    ]
    for phase in ("text", "reason"):
        first += [f"phases.{phase}.batch_sequences=2", f"phases.{phase}.micro_sequences=2"]
    train(load_recipe("tiny", first), out, quiet)
    rows = [{"messages": TALK}, {"messages": TALK[:2]}] * 5
    (out / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return out


@pytest.fixture
def tune(base, quiet):
    """Runs a recipe that starts from the base; the folder of its last checkpoint."""

    def run(name, kind="lora", *overrides):
        fields = [*SHORT, f"name={name}", f"sources.mine.path={base / 'chats.jsonl'}", *overrides]
        if not any(field.startswith("start_from") for field in overrides):
            fields.append(f"start_from={base / 'tiny'}")
        recipe = load_recipe(kind, fields, lambda start, run: architecture_of(start, base / run))
        return train(recipe, base, quiet)

    return run


@torch.no_grad()
def logits_of(model, tokens):
    return model.logits(model(tokens).hidden)


def command(capsys, *argv: Any) -> str:
    assert cli.main([str(part) for part in argv]) == 0
    return capsys.readouterr().out


def test_train_adapt_generate_merge_generate(base, tune, tmp_path, capsys):
    final = tune("whole")
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= {
        file.name for file in final.iterdir()
    }
    assert not (final / "model.safetensors").exists()
    settings = json.loads((final / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(base / "tiny")
    merged = tmp_path / "merged"
    command(capsys, "merge", base / "tiny", "--adapter", base / "whole", "-o", merged)
    greedy = ("the quick", "--temperature", 0, "--max-tokens", 12, "--json")
    said = [
        json.loads(command(capsys, "generate", *argv, *greedy))["ids"]
        for argv in (
            (base / "tiny", "--adapter", base / "whole"),
            (base / "tiny", "--adapter", final),
            (merged,),
        )
    ]
    assert said[0] == said[1] == said[2]
    tokens = torch.arange(7, 40)[None]
    plain, _ = open_checkpoint(base / "tiny")
    kept, tokenizer = open_folder(find_checkpoint(base / "tiny"), adapter=base / "whole")
    together, _ = open_checkpoint(merged)
    torch.testing.assert_close(logits_of(together, tokens), logits_of(kept, tokens))
    assert (logits_of(plain, tokens) - logits_of(kept, tokens)).abs().max() > 1e-2
    assert isinstance(open_chat_format(merged, tokenizer), NativeFormat)
    answer = command(
        capsys, "generate", base / "tiny", "--chat", "hi", "--adapter", final, "--json"
    )
    assert json.loads(answer)["ids"]


def test_only_the_adapter_moves_and_every_matrix_is_reached(base, tune):
    """Proof of gradient: B at the first step, A at the second."""
    seen = {}
    original = trainer.prove_gradients

    def watched(model, load, side):
        for name, module, attribute, change in adapters.kept(model):
            gradient = {"a": change.a, "b": change.b}[side].grad
            counts = load[int(name.split(".")[2])].tolist()
            parts = gradient if gradient.ndim == 3 else gradient[None]
            for expert, part in enumerate(parts):
                if gradient.ndim == 2 or counts[expert]:
                    seen[side, name, expert] = float(part.norm())
            assert getattr(module.parametrizations, attribute).original.grad is None
        frozen = [p for p in model.parameters() if not p.requires_grad]
        assert all(p.grad is None for p in frozen)
        return original(model, load, side)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "prove_gradients", watched)
        tune("proof", "lora", "phases.tune.steps=2", "run.eval_every=0")
    recipe = load_recipe(str(base / "proof" / "recipe.toml"))
    targets = new_adapter(recipe.model, recipe.adapter.targets, 1, 1.0).pairs
    assert {name for _, name, _ in seen} == set(targets)
    for side in "ab":
        reached = dict.fromkeys(targets, 0.0)
        for (of, name, _), norm in seen.items():
            reached[name] = max(reached[name], norm * (of == side))
        assert min(reached.values()) > 0
    records = [r for r in read_metrics(base / "proof") if "loss" in r]
    for record in records:
        assert set(record["adapter_gradients"]) == {"attention", "experts", "router"}
        assert min(record["adapter_gradients"].values()) > 0
    trained = find_adapter(base / "proof")
    biases = [n for n in read_tensors(trained / "training.safetensors") if n.startswith("balance")]
    assert biases == [], "the controller stands still"


def test_a_matrix_without_gradient_ends_the_run(base, tune, monkeypatch):
    begin = adapters.begin_adapter

    def severed(model, *args):
        made = begin(model, *args)
        changes = {name: change for name, _, _, change in adapters.kept(model)}
        changes["model.layers.1.mlp.gate.router_mlp.fc1.weight"].forward = lambda weight: weight
        return made

    monkeypatch.setattr("openzaya.train.state.begin_adapter", severed)
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.gate.*fc1.*no gradient \(factor B\)"):
        tune("severed")


@pytest.mark.parametrize(
    ("label", "kind"),
    [
        ("dropout", ("lora", "adapter.dropout=0.3")),
        ("magnitude", ("lora", "adapter.kind=dora", 'adapter.targets=["attention", "router"]')),
        ("neftune", ("sft", "neftune_alpha=5.0")),
    ],
)
def test_resuming_is_exact(base, tune, label, kind, monkeypatch):
    """With noise on embeddings, dropout and magnitudes; stopped in mid-step."""
    whole = tune(f"w{label}", *kind)
    original = trainer._Trainer._step

    def interrupted(self, phase, index, step):
        if self.state.step == 3:
            signal.raise_signal(signal.SIGTERM)
        return original(self, phase, index, step)

    monkeypatch.setattr(trainer._Trainer, "_step", interrupted)
    with pytest.raises(Stopped):
        tune(f"p{label}", *kind)
    monkeypatch.setattr(trainer._Trainer, "_step", original)
    parts = tune(f"p{label}", *kind)
    assert curve(base / f"w{label}") == curve(base / f"p{label}")
    for name in ("adapter_model", "model", "training"):
        file = f"{name}.safetensors"
        assert (whole / file).exists() == (parts / file).exists()
        if (whole / file).exists():
            assert_same_tensors(read_tensors(whole / file), read_tensors(parts / file))


def test_dora_is_saved_read_again_and_merged(base, tune, tmp_path, capsys):
    final = tune("dora", "lora", "adapter.kind=dora", 'adapter.targets=["attention"]')
    config = load_recipe(str(final / "recipe.toml")).model
    adapter = read_adapter(final, config)
    plain = load_model(find_checkpoint(base / "tiny"))
    for name, pair in adapter.pairs.items():
        assert pair.magnitude is not None
        assert not torch.equal(pair.magnitude, plain.get_parameter(name).norm(dim=1))
    attach(plain, adapter)
    command(capsys, "merge", base / "tiny", "--adapter", final, "-o", tmp_path / "merged")
    together, _ = open_checkpoint(tmp_path / "merged")
    tokens = torch.arange(7, 40)[None]
    torch.testing.assert_close(logits_of(together, tokens), logits_of(plain, tokens))
    assert cli.main(["merge", str(base / "tiny"), "--adapter", str(final), "-o", str(final)]) == 2


def test_a_base_in_bfloat16_trains_the_same(base, tune):
    """With products in bfloat16 that is what every weight is rounded to anyway, but for its sum."""
    losses = []
    for name, dtype in (("wide", "float32"), ("narrow", "bfloat16")):
        tune(name, "lora", f"adapter.base_dtype={dtype}", "neftune_alpha=0")
        losses.append([r["loss"] for r in read_metrics(base / name) if "loss" in r])
    assert losses[0] != losses[1]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=0, atol=2e-2)


def test_another_base_is_refused_on_resuming(base, tune, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(find_checkpoint(base / "tiny"), copy)
    final = tune("moved", "lora", f"start_from={copy}", "phases.tune.steps=4")
    shutil.rmtree(final)
    model = load_model(copy)
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-6
    save_model(model, copy)
    (copy / "manifest.json").unlink()
    with pytest.raises(UserError, match="start_from does not hold the weights"):
        tune("moved", "lora", f"start_from={copy}", "phases.tune.steps=4")


def test_an_adapter_is_not_taken_for_a_model(base, tune, tmp_path):
    final = tune("whole")
    for path in (base / "whole", final):
        with pytest.raises(UserError, match="holds an adapter and no model"):
            find_checkpoint(path)
    with pytest.raises(UserError, match="is no adapter"):
        find_adapter(base / "tiny")
    shutil.copytree(final, tmp_path / "damaged")
    (tmp_path / "damaged" / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(UserError, match="is damaged"):
        find_adapter(tmp_path / "damaged")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["adapter.kind=dora"], "dora has no magnitudes for experts"),
        (["phases.tune.rope_theta=123.0"], "cannot hold another rope_theta"),
        (["adapter.base_dtype=bfloat16", "run.compute_dtype=float32"], "would round the sum"),
        (['adapter.targets=["embed_tokens.weight"]'], "cannot be adapted"),
        (['adapter.targets=["nothing"]'], "no matrix 'nothing'"),
        (["adapter.rank=0"], "adapter.rank"),
        (["adapter.rnak=1"], r"adapter\.rnak: unknown key \(did you mean 'rank'"),
        (["model.rope_theta=123.0"], "rope_theta is 123.0"),
    ],
)
def test_recipes_that_cannot_be(tune, overrides, message):
    with pytest.raises(UserError, match=message):
        tune("bad", "lora", *overrides)


def test_an_adapter_needs_a_base():
    fields = ["adapter.rank=2", "sources.plays.kind=text", "sources.plays.path=x"]
    with pytest.raises(UserError, match="set start_from"):
        load_recipe("tiny", fields)


def test_what_is_learned_is_what_the_checkpoint_says(base, tune, tmp_path, quiet):
    """The template of the start is what chats are shown in, and what the result holds."""
    start = tmp_path / "start"
    shutil.copytree(find_checkpoint(base / "tiny"), start)
    (start / "manifest.json").unlink()
    config = json.loads((start / "tokenizer_config.json").read_text())
    del config["chat_template"]
    config["added_by"] = "its makers"
    (start / "tokenizer_config.json").write_text(json.dumps(config))
    (start / "chat_template.jinja").write_text(FORGETFUL)
    (start / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 4]}))
    name = f"own{tmp_path.name[-1]}"
    final = tune(name, "sft", f"start_from={start}", "phases.tune.mixture.sums=1.0")
    assert (final / "chat_template.jinja").read_text() == FORGETFUL
    assert json.loads((final / "generation_config.json").read_text())["eos_token_id"] == [1, 4]
    theirs = AutoTokenizer.from_pretrained(final)
    assert json.loads((final / "tokenizer_config.json").read_text())["added_by"] == "its makers"
    _, tokenizer = open_checkpoint(final)
    form = open_chat_format(final, tokenizer)
    assert isinstance(form, TemplateFormat)
    assert {1, 4} <= set(form.stop_ids)
    template = read_template(base / name, tokenizer)
    assert template is not None
    made = ChatEncoder(tokenizer, template).encode(Conversation(TALK), ["assistant"])
    assert len(made) == 2
    for document, turns in zip(made, (2, 4), strict=True):
        given = theirs.apply_chat_template(TALK[:turns], return_dict=True)["input_ids"]
        assert document.ids == given
        # What serving asks is how the document begins, up to the first token that is learned.
        asked = form.prompt([Turn(m["role"], m["content"]) for m in TALK[: turns - 1]], False)
        assert document.ids[: len(asked.ids)] == asked.ids
        assert document.roles.index(3) == len(asked.ids)


def test_our_template_stays_ours(base, tune):
    final = tune("ours", "sft")
    _, tokenizer = open_checkpoint(final)
    assert isinstance(open_chat_format(final, tokenizer), NativeFormat)
    theirs = AutoTokenizer.from_pretrained(final)
    given = theirs.apply_chat_template(TALK, return_dict=True)["input_ids"]
    assert given == encode_chat(TALK, tokenizer)[0]
    heldout = [r["heldout"] for r in read_metrics(base / "ours") if "heldout" in r]
    assert set(heldout[-1]) == {"sums", "mine"}


def test_a_bad_call_in_a_source_is_named_before_step_1(base, tune):
    """Field note 39: JSON inside the wrapper."""
    wrapped = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    rows = [TALK, [TALK[0], {"role": "assistant", "content": wrapped}]]
    file = base / "json.jsonl"
    file.write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    with pytest.raises(UserError, match=r"json\.jsonl:2: message 2: .*JSON inside the tags"):
        tune("json", "sft", f"sources.mine.path={file}")
    assert read_metrics(base / "json") == []
