"""The oracle of an ablation that was stopped is the one that never was."""

import json
import signal

import pytest
import torch

from openzaya.ablation import run as running
from openzaya.ablation.plan import base_recipe, plan_runs, run_name
from openzaya.ablation.result import RESULT, all_results
from openzaya.ablation.run import run_ablation, time_left
from openzaya.checkpoint.load import read_tensors
from openzaya.checkpoint.run import checkpoint_path
from openzaya.checkpoint.weights import WEIGHTS
from openzaya.cli.main import main
from openzaya.config.load import load_recipe
from openzaya.errors import UserError
from openzaya.train import trainer
from openzaya.train.metrics import read_metrics
from openzaya.train.stop import Stopped

STEPS, SIZES, PAIR = 3, (96, 144), ("standard", "moe++")


@pytest.fixture
def base(recipe_file):
    return base_recipe(load_recipe(str(recipe_file)), STEPS)


@pytest.fixture
def runs(base):
    return plan_runs(base, SIZES, PAIR, (0,))


def comparable(out):
    return [result.model_copy(update={"seconds": 0.0}) for result in all_results(out)]


def weights(folder):
    return read_tensors(checkpoint_path(folder, STEPS) / WEIGHTS)


def test_an_ablation_from_the_command_line(recipe_file, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["ablate", str(recipe_file), "--out", str(out), "--steps", str(STEPS)]
    command += ["--sizes", "96,144", "--variants", "moe++,standard", "--seeds", "0"]
    assert main([*command, "--json"]) == 0
    said = capsys.readouterr()
    summary = json.loads(said.out)
    assert "run 4 of 4: size 144, moe++, seed 0" in said.err
    assert "so far at 96: standard " in said.err
    assert summary["steps"] == STEPS
    assert summary["tokens"] == STEPS * 4 * 32
    assert [(row["size"], row["variant"]) for row in summary["rows"]] == [
        (size, variant) for size in SIZES for variant in PAIR
    ]
    for row in summary["rows"]:
        records = read_metrics(out / run_name(row["size"], row["variant"], 0))
        (heldout,) = [r["heldout"] for r in records if "heldout" in r]
        assert heldout == row["heldout"]
        assert row["loss"] == pytest.approx(sum(heldout.values()) / 2)
    assert (out / "curves.png").is_file()

    assert main(["ablate", "--report-only", "--no-plot", "--json", "--out", str(out)]) == 0
    assert json.loads(capsys.readouterr().out) == summary
    assert main(command) == 0
    said, _, files = capsys.readouterr().out.partition("written in ")
    assert "4 of 4 runs are finished already" in said
    assert "run 1 of 4" not in said
    assert max(map(len, said.splitlines())) <= 80
    assert "table.md" in files


def test_runs_of_a_size_and_seed_read_the_same_batches(base, tmp_path, quiet, monkeypatch):
    seen = {}
    original = trainer._Trainer._gradients

    def watched(self, batch, micro):
        seen.setdefault(self.recipe.name, []).append(batch.tokens)
        return original(self, batch, micro)

    monkeypatch.setattr(trainer._Trainer, "_gradients", watched)
    run_ablation(base, plan_runs(base, (96,), PAIR, (0, 1)), tmp_path / "out", quiet)
    assert [len(batches) for batches in seen.values()] == [STEPS] * 4
    for seed in (0, 1):
        a, b = (torch.stack(seen[run_name(96, variant, seed)]) for variant in PAIR)
        assert torch.equal(a, b)
    assert not torch.equal(torch.stack(seen["96-standard-0"]), torch.stack(seen["96-standard-1"]))


@pytest.mark.parametrize("stop_at", [0, 4])
def test_stopped_and_continued_is_never_stopped(base, runs, tmp_path, quiet, stop_at, monkeypatch):
    """A signal in the first step of all, and in a later run."""
    run_ablation(base, runs, tmp_path / "whole", quiet)
    original, count = trainer._Trainer._step, 0

    def interrupted(self, phase, index, step):
        nonlocal count
        count += 1
        if count == stop_at + 1:
            signal.raise_signal(signal.SIGTERM)
        return original(self, phase, index, step)

    monkeypatch.setattr(trainer._Trainer, "_step", interrupted)
    with pytest.raises(Stopped) as stopped:
        run_ablation(base, runs, tmp_path / "parts", quiet)
    assert stopped.value.exit_code == 128 + signal.SIGTERM
    assert len(all_results(tmp_path / "parts")) == stop_at // STEPS
    run_ablation(base, runs, tmp_path / "parts", quiet)
    assert count == len(runs) * STEPS + 1, "only the step that was given up is done again"
    assert comparable(tmp_path / "parts") == comparable(tmp_path / "whole")
    for planned in runs:
        ours, theirs = (weights(tmp_path / w / planned.recipe.name) for w in ("parts", "whole"))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_signal_between_runs_stops_too(base, runs, tmp_path, quiet, monkeypatch):
    def record(*args):
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(running, "record", record)
        with pytest.raises(Stopped) as stopped:
            run_ablation(base, runs[:2], tmp_path / "out", quiet)
    assert stopped.value.exit_code == 130
    assert all_results(tmp_path / "out") == []
    steps = []
    original = trainer._Trainer._step
    monkeypatch.setattr(
        trainer._Trainer,
        "_step",
        lambda self, *args: steps.append(self.recipe.name) or original(self, *args),
    )
    run_ablation(base, runs[:2], tmp_path / "out", quiet)
    assert set(steps) == {"96-moepp-0"}, "the trained run is recorded without another step"
    assert len(all_results(tmp_path / "out")) == 2


def test_a_damaged_result_is_made_again(base, runs, tmp_path, quiet):
    out = tmp_path / "out"
    run_ablation(base, runs[:1], out, quiet)
    file = out / runs[0].recipe.name / RESULT
    whole = file.read_text()
    file.write_text(whole[:40])
    run_ablation(base, runs[:1], out, quiet)
    assert file.read_text() == whole


def test_a_folder_takes_one_ablation(base, runs, recipe_file, tmp_path, quiet):
    out = tmp_path / "out"
    run_ablation(base, runs[:1], out, quiet)
    other = base_recipe(load_recipe(str(recipe_file)), STEPS + 1)
    with pytest.raises(UserError, match=r"another recipe.*\n.*steps: 3 -> 4"):
        run_ablation(other, plan_runs(other, (96,), PAIR, (0,)), out, quiet)
    run_ablation(base, plan_runs(base, (96,), ("cca",), (7,)), out, quiet)
    assert [(r.variant, r.seed) for r in all_results(out)] == [("standard", 0), ("cca", 7)]


def test_texts_that_changed_in_between_are_refused(base, runs, tmp_path, quiet):
    out = tmp_path / "out"
    run_ablation(base, runs[:1], out, quiet)
    (tmp_path / "b.txt").write_text("\n\n".join(f"another text {i} of this" * 9 for i in range(60)))
    with pytest.raises(UserError, match=r"the text of .*b changed"):
        run_ablation(base, runs[:2], out, quiet)


def test_time_left_follows_size_and_what_is_done(base, runs, tmp_path, quiet):
    assert time_left(runs, []) == ""
    run_ablation(base, runs[:1], tmp_path / "out", quiet)
    (result,) = all_results(tmp_path / "out")
    result = result.model_copy(update={"seconds": 100.0})
    factors = [planned.training_flops / runs[0].training_flops for planned in runs[1:]]
    assert factors[1] > 2 > factors[0]
    minutes, seconds = time_left(runs, [result]).split(":")
    assert int(minutes) * 60 + int(seconds) == pytest.approx(100 * sum(factors), abs=1)
    assert time_left(runs[:1], [result]) == "0:00"


def test_tokens_give_steps(recipe_file):
    recipe = load_recipe(str(recipe_file))
    assert base_recipe(recipe, tokens=20 * 4 * 32).total_steps == 20
    assert base_recipe(recipe).total_steps == 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "96,x"], "whole numbers"),
        (["--sizes", "96,96"], "only once"),
        (["--sizes", "0"], "from 1"),
        (["--sizes", "8"], "no head width"),
        (["--seeds", "-1"], "from 0"),
        (["--variants", "standard,mla"], "no variant 'mla'"),
        (["--steps", "0"], "--steps"),
        (["--tokens", "0"], "--tokens"),
        (["--set", "seed=3"], "--seeds"),
        (["--set", "name=x"], "--out"),
        (["--set", "phases.text.step=1"], "did you mean 'steps'"),
        (["--set", "start_from=somewhere"], "start_from"),
        (["--set", "sources.a.heldout=0", "--set", "sources.b.heldout=0"], "held-out"),
        (["--set", 'model.layer_types=["hybrid","hybrid"]'], "layer_types"),
        (["--report-only"], "takes no recipe"),
    ],
)
def test_bad_input_is_one_message_before_any_work(
    recipe_file, tmp_path, arguments, message, capsys
):
    out = tmp_path / "out"
    assert main(["ablate", str(recipe_file), "--out", str(out), *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert not out.exists()


def test_nothing_to_report_and_no_recipe(tmp_path, capsys):
    assert main(["ablate", "--report-only", "--out", str(tmp_path / "none")]) == 2
    assert "no run is finished" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
    assert main(["ablate"]) == 2
    assert "name a recipe" in capsys.readouterr().err


def test_the_plan_trains_nothing(recipe_file, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["ablate", str(recipe_file), "--out", str(out), "--plan", "--sizes", "96,144"]
    assert main([*command, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert len(plan["runs"]) == 20
    assert len(plan["models"]) == 10
    assert not out.exists()
    assert main(command) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
