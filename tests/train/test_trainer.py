"""The oracle of a resumed run is the run that never stopped; of micro-batches, the whole batch."""

import json
import shutil
import signal

import pytest
import torch

from openzaya.checkpoint.load import load_model, read_tensors
from openzaya.checkpoint.run import checkpoint_path, list_checkpoints
from openzaya.checkpoint.weights import WEIGHTS
from openzaya.errors import UserError
from openzaya.model.model import Zaya
from openzaya.train import trainer
from openzaya.train.metrics import read_metrics
from openzaya.train.stop import Stopped
from openzaya.train.trainer import train

VOLATILE = ("seconds", "tokens_per_second")


def curve(run):
    return [
        {key: value for key, value in record.items() if key not in VOLATILE}
        for record in read_metrics(run)
    ]


def everything(run, step):
    folder = checkpoint_path(run, step)
    return {**read_tensors(folder / WEIGHTS), **read_tensors(folder / "training.safetensors")}


def assert_same_tensors(a, b):
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.fixture
def finished(recipe, quiet, tmp_path):
    train(recipe("name=whole"), tmp_path, quiet)
    return tmp_path / "whole"


def test_a_run_writes_what_it_promises(finished):
    assert [step for step, _ in list_checkpoints(finished)] == [3, 4, 6, 8]
    records = read_metrics(finished)
    steps = [r for r in records if "loss" in r]
    assert [r["step"] for r in steps] == list(range(1, 9))
    assert [r["phase"] for r in steps] == ["text"] * 4 + ["reason"] * 4
    heldout = [r for r in records if "heldout" in r]
    assert [sorted(r["heldout"]) for r in heldout] == [["plays"], ["plays", "sums"]]
    for r in steps:
        assert len(r["load_entropy"]) == len(r["skip_share"]) == 2
        assert sum(r["load"][0]) == sum(r["load"][1])
    assert sum(steps[0]["load"][0]) == 4 * 32, "each token of the global batch is counted once"
    final = load_model(checkpoint_path(finished, 8))
    assert final.config.rope_theta == 20_000.0, "the phase's base is the checkpoint's"
    assert final.config.max_position_embeddings == 128
    earlier = load_model(checkpoint_path(finished, 4))
    assert earlier.config.rope_theta == 10_000.0


@pytest.mark.parametrize("stop_after", [2, 4, 7])
def test_resuming_is_bit_identical(recipe, quiet, tmp_path, finished, stop_after, monkeypatch):
    """Stopped by a signal in mid-step: at any step, at a phase border, after an evaluation."""
    original = trainer._Trainer._step

    def interrupted(self, phase, index, step):
        if self.state.step == stop_after:
            signal.raise_signal(signal.SIGTERM)
        return original(self, phase, index, step)

    monkeypatch.setattr(trainer._Trainer, "_step", interrupted)
    with pytest.raises(Stopped) as stopped:
        train(recipe("name=parts"), tmp_path, quiet)
    assert stopped.value.exit_code == 128 + signal.SIGTERM
    run = tmp_path / "parts"
    assert list_checkpoints(run)[-1][0] == stop_after
    monkeypatch.setattr(trainer._Trainer, "_step", original)
    train(recipe("name=parts"), tmp_path, quiet)
    assert curve(run) == curve(finished)
    assert_same_tensors(everything(run, 8), everything(finished, 8))


def test_ramp_curriculum_and_noise_resume_like_everything_else(recipe, quiet, tmp_path):
    """Stopped in the ramp, and after it."""
    moving = [
        "phases.text.context=128",
        "phases.text.tokens=1792",
        "phases.text.steps=0",
        "phases.text.batch_ramp=[{batch_sequences=2, steps=1}]",
        "phases.text.schedule=wsd",
        "phases.text.decay_steps=2",
        "phases.text.mixture_final={plays=0.2, sums=0.8}",
        "token_noise=0.2",
    ]
    train(recipe("name=whole", *moving), tmp_path, quiet)
    whole = curve(tmp_path / "whole")
    tokens = [r["step_tokens"] for r in whole if "loss" in r]
    assert tokens[0] <= 256 < tokens[1] <= 512
    assert sorted(whole[-1]["heldout"]) == ["plays", "sums"]
    original = trainer._Trainer._step
    for stop_after in (1, 3):
        name = f"name=parts{stop_after}"

        def interrupted(self, phase, index, step, at=stop_after):
            if self.state.step == at:
                signal.raise_signal(signal.SIGTERM)
            return original(self, phase, index, step)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer._Trainer, "_step", interrupted)
            with pytest.raises(Stopped):
                train(recipe(name, *moving), tmp_path, quiet)
        train(recipe(name, *moving), tmp_path, quiet)
        assert curve(tmp_path / f"parts{stop_after}") == whole


def test_a_signal_between_micro_batches_gives_the_step_up(recipe, quiet, tmp_path, finished):
    """Half a step's gradients must not leak into the resumed one."""

    calls = 0

    def loss(self, hidden, targets, original=Zaya.loss):
        nonlocal calls
        calls += 1
        if calls == 6:  # the second micro-batch of step 3
            signal.raise_signal(signal.SIGINT)
        return original(self, hidden, targets)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Zaya, "loss", loss)
        with pytest.raises(Stopped) as stopped:
            train(recipe("name=parts"), tmp_path, quiet)
    assert stopped.value.exit_code == 130
    train(recipe("name=parts"), tmp_path, quiet)
    assert_same_tensors(everything(tmp_path / "parts", 8), everything(finished, 8))


def test_an_evaluation_that_a_signal_cut_short_is_made_up_for(
    recipe, quiet, tmp_path, finished, monkeypatch
):
    original = trainer.heldout_loss

    def interrupted(model, batch, micro, stop):
        signal.raise_signal(signal.SIGTERM)
        return original(model, batch, micro, stop)

    monkeypatch.setattr(trainer, "heldout_loss", interrupted)
    for _ in range(2):  # at the border, and again where the resumed run makes up for it
        with pytest.raises(Stopped):
            train(recipe("name=parts"), tmp_path, quiet)
    monkeypatch.setattr(trainer, "heldout_loss", original)
    train(recipe("name=parts"), tmp_path, quiet)
    assert curve(tmp_path / "parts") == curve(finished)


def test_text_that_changed_is_not_trained_on(recipe, quiet, tmp_path, finished):
    (tmp_path / "text.txt").write_text("\n\n".join(f"another text {i}" * 9 for i in range(60)))
    with pytest.raises(UserError, match="plays is not what"):
        train(recipe("name=whole"), tmp_path, quiet)


def test_a_finished_run_is_not_repeated(recipe, quiet, tmp_path, finished, monkeypatch):
    def never(*args):
        raise AssertionError("a step was run")

    monkeypatch.setattr(trainer._Trainer, "_step", never)
    assert train(recipe("name=whole"), tmp_path, quiet) == checkpoint_path(finished, 8)


def test_a_lost_tail_of_the_log_is_rewritten(recipe, quiet, tmp_path, finished):
    """A crash after the last checkpoint: the log holds steps that the run has to do again."""
    expected = curve(finished)
    for step in (6, 8):
        shutil.rmtree(checkpoint_path(finished, step))
    with (finished / "metrics.jsonl").open("a") as log:
        log.write('{"step": 9, "lo')
    train(recipe("name=whole"), tmp_path, quiet)
    assert curve(finished) == expected


def test_micro_batches_do_not_change_the_step(recipe, quiet, tmp_path):
    """1 x 4 sequences against 4 x 1 in fp32: same loss and weights, to rounding."""
    runs = {}
    for micro in (4, 1):
        fields = [f"phases.{p}.micro_sequences={micro}" for p in ("text", "reason")]
        name = f"m{micro}"
        train(
            recipe(
                f"name={name}",
                "run.compute_dtype=float32",
                "optimizer.newton_schulz_dtype=float32",
                *fields,
            ),
            tmp_path,
            quiet,
        )
        runs[micro] = tmp_path / name
    for a, b in zip(curve(runs[4]), curve(runs[1]), strict=True):
        if "loss" in a:
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
            assert a["load"] == b["load"]
    a, b = (load_model(checkpoint_path(runs[micro], 8)) for micro in (4, 1))
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4, msg=name)


def test_training_lowers_the_loss(recipe, quiet, tmp_path):
    train(recipe("name=longer", "phases.text.steps=60", "run.eval_every=0"), tmp_path, quiet)
    losses = [r["loss"] for r in read_metrics(tmp_path / "longer") if r["phase"] == "text"]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


def test_a_damaged_checkpoint_is_passed_over(recipe, tmp_path, finished, capsys, quiet):
    newest = checkpoint_path(finished, 8) / "model.safetensors"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    expected = curve(finished)
    from rich.console import Console

    train(recipe("name=whole"), tmp_path, Console(width=300))
    said = capsys.readouterr().out
    assert "damaged" in said
    assert "continuing after step 6" in said
    assert curve(finished) == expected
    for step, path in list_checkpoints(finished):
        (path / "manifest.json").write_text("{}")
        assert step
    with pytest.raises(UserError, match="every checkpoint of this run is damaged"):
        train(recipe("name=whole"), tmp_path, quiet)


def test_old_checkpoints_are_pruned(recipe, quiet, tmp_path):
    train(recipe("name=few", "run.keep_checkpoints=2"), tmp_path, quiet)
    assert [step for step, _ in list_checkpoints(tmp_path / "few")] == [6, 8]


def test_another_recipe_is_refused_in_the_same_folder(recipe, quiet, tmp_path, finished):
    before = curve(finished)
    with pytest.raises(UserError, match=r"another recipe[\s\S]*phases\.0\.lr"):
        train(recipe("name=whole", "phases.text.lr=0.0123"), tmp_path, quiet)
    assert curve(finished) == before


def test_a_loss_that_is_not_finite_stops_the_run(recipe, quiet, tmp_path):
    with pytest.raises(UserError, match="is not finite"):
        train(
            recipe("name=hot", "phases.text.lr=1e30", "phases.text.warmup_steps=0"),
            tmp_path,
            quiet,
        )
    assert list_checkpoints(tmp_path / "hot"), "the state before the bad step is saved"
    assert not any(r["loss"] != r["loss"] for r in read_metrics(tmp_path / "hot") if "loss" in r)


def test_tensorboard_gets_the_same_figures(recipe, quiet, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(recipe("name=board", "run.tensorboard=true"), tmp_path, quiet)
    events = EventAccumulator(str(tmp_path / "board" / "tensorboard"))
    events.Reload()
    logged = {e.step: e.value for e in events.Scalars("loss")}
    records = [r for r in read_metrics(tmp_path / "board") if "loss" in r]
    assert logged == pytest.approx({r["step"]: r["loss"] for r in records}, rel=1e-6)
    assert {"load_entropy/0", "skip_share/1", "heldout/plays", "grad_norm"} <= set(
        events.Tags()["scalars"]
    )


def test_checkpoints_hold_no_pickle(finished):
    names = {p.name for _, folder in list_checkpoints(finished) for p in folder.iterdir()}
    assert {name.rsplit(".", 1)[-1] for name in names} == {"json", "safetensors", "toml"}
    assert json.loads((checkpoint_path(finished, 8) / "training.json").read_text())["step"] == 8


def test_a_checkpoint_opens_in_transformers_as_it_is(finished):
    """Model, tokenizer and chat template, with the same greedy tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from openzaya.data.chat import encode_chat
    from openzaya.serve.generate import generate
    from openzaya.serve.loading import open_checkpoint
    from openzaya.serve.sampling import SamplingSettings

    folder = checkpoint_path(finished, 8)
    model, tokenizer = open_checkpoint(folder)
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    ids, _ = encode_chat(messages, tokenizer, add_generation_prompt=True)
    theirs = AutoTokenizer.from_pretrained(folder)
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert theirs(text, add_special_tokens=False)["input_ids"] == ids
    assert (theirs.pad_token_id, theirs.eos_token_id) == (tokenizer.pad_id, tokenizer.eos_id)
    settings = SamplingSettings(temperature=0.0, max_new_tokens=20)
    ours = generate(model, tokenizer, [ids], settings, stop_ids=[])[0].ids
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    made = peer.generate(
        torch.tensor([ids]), do_sample=False, max_new_tokens=20, min_new_tokens=20, eos_token_id=[]
    )
    assert made[0, len(ids) :].tolist() == ours
