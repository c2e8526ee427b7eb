"""Everything that can be wrong is said before step 1, and nothing half-written stays."""

import resource
import signal
import subprocess
import sys
import time

import pytest

from openzaya.checkpoint.run import list_checkpoints
from openzaya.config.load import recipe_to_toml
from openzaya.errors import UserError
from openzaya.train.metrics import read_metrics
from openzaya.train.setup import exclusive
from openzaya.train.trainer import train


def command(file, out):
    return [sys.executable, "-m", "openzaya.cli.main", "train", str(file), "--out", str(out)]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sources.plays.path=/nowhere/at/all.txt"], "plays.*nowhere"),
        (["tokenizer.path=/nowhere/tokenizer.json"], "nowhere/tokenizer.json"),
        (["phases.text.context=500", "sources.plays.heldout=0.98"], "plays"),
        (["run.device=cuda"], "no GPU is available"),
    ],
)
def test_wrong_recipes_stop_before_training(recipe, quiet, tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        train(recipe("name=bad", *overrides), tmp_path, quiet)
    assert not (tmp_path / "bad" / "checkpoints").exists()
    assert read_metrics(tmp_path / "bad") == []


def test_an_empty_corpus_is_named(recipe, quiet, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text("  \n ")
    with pytest.raises(UserError, match="plays"):
        train(recipe("name=bad", f"sources.plays.path={empty}"), tmp_path, quiet)


def test_a_tokenizer_larger_than_the_model_is_refused(recipe, quiet, tmp_path):
    from openzaya.data.tokenizer import Tokenizer

    text = [" ".join(f"w{a}{b}" for a in "abcdefghij" for b in "klmnopqrst" * 3)] * 3
    big = Tokenizer.train([*text, "".join(map(chr, range(200, 900)))], 700)
    big.save(tmp_path / "big.json")
    assert big.vocab_size > 512
    with pytest.raises(UserError, match=f"{big.vocab_size} entries.*512"):
        train(recipe("name=bad", f"tokenizer.path={tmp_path / 'big.json'}"), tmp_path, quiet)


def test_a_recipe_can_be_mended_after_an_error(recipe, quiet, tmp_path):
    """The folder is not claimed for good by a recipe that never trained."""
    with pytest.raises(UserError):
        train(recipe("name=again", "sources.plays.path=/nowhere.txt"), tmp_path, quiet)
    train(recipe("name=again"), tmp_path, quiet)


def test_a_full_disk_ends_with_one_message_and_the_last_checkpoint_whole(recipe, tmp_path):
    """A real limit of the system: no file may grow beyond 150 kB."""
    file = tmp_path / "r.toml"
    file.write_text(recipe_to_toml(recipe("name=full")))

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))

    result = subprocess.run(
        command(file, tmp_path), capture_output=True, text=True, preexec_fn=limit, check=False
    )
    assert result.returncode == 2, result.stderr
    assert "cannot write" in result.stderr
    assert "Traceback" not in result.stderr
    assert list_checkpoints(tmp_path / "full") == []
    assert [p.name for p in (tmp_path / "full" / "checkpoints").iterdir()] == []


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_from_outside_saves_first(recipe, tmp_path, signum):
    file = tmp_path / "r.toml"
    file.write_text(recipe_to_toml(recipe("name=killed", "phases.text.steps=5000")))
    with subprocess.Popen(
        command(file, tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 60
        while len(read_metrics(tmp_path / "killed")) < 5 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signum)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signum, err
    assert "is saved" in out
    steps = [r["step"] for r in read_metrics(tmp_path / "killed") if "loss" in r]
    assert list_checkpoints(tmp_path / "killed")[-1][0] == steps[-1] >= 4


def test_two_processes_cannot_train_in_one_folder(recipe, quiet, tmp_path):
    with (
        exclusive(tmp_path / "busy"),
        pytest.raises(UserError, match="another process is training"),
    ):
        train(recipe("name=busy"), tmp_path, quiet)
    train(recipe("name=busy"), tmp_path, quiet)


def test_an_output_folder_that_cannot_be_made_is_one_message(recipe, tmp_path):
    (tmp_path / "file").write_text("")
    file = tmp_path / "r.toml"
    file.write_text(recipe_to_toml(recipe("name=x")))
    result = subprocess.run(
        command(file, tmp_path / "file"), capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert str(tmp_path / "file") in result.stderr


def test_a_source_without_a_heldout_side_is_named_before_step_1(recipe, quiet, tmp_path):
    """One text file without a separator is one document."""
    one = tmp_path / "one.txt"
    one.write_text("to be or not to be that is the question " * 50)
    single = [f"sources.plays.path={one}", 'sources.plays.separator="@@@"']
    with pytest.raises(UserError, match="no held-out documents"):
        train(recipe("name=one", *single), tmp_path, quiet)
    assert read_metrics(tmp_path / "one") == []
    train(recipe("name=one", *single, "sources.plays.heldout=0"), tmp_path, quiet)
