import subprocess
import sys
import time

import pytest

from openzaya.cli import main as cli


def test_help_lists_every_verb(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    for verb in cli.VERBS:
        assert f"\n  {verb} " in shown or f"\n    {verb} " in shown
    assert max(map(len, shown.splitlines())) <= 100


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_teaches_by_example(verb, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main([verb, "--help"])
    assert left.value.code == 0
    assert f"openzaya {verb}" in capsys.readouterr().out


def test_help_needs_no_torch():
    code = "import sys; from openzaya.cli.main import build_parser; build_parser(); " + (
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nowhere"], "no recipe 'nowhere'"),
        (["train", "tiny", "sed=1"], "did you mean 'seed'"),
        (["train", "tiny", "seed=many"], "seed"),
        (["inspect", "huge"], "huge"),
        (["generate", "/nowhere", "x"], "nowhere"),
        (["chat", "/nowhere"], "nowhere"),
        (["demo", "--minutes", "0"], "out of range"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(arguments, message, capsys):
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err


def test_train_prints_the_resolved_recipe(capsys):
    assert cli.main(["train", "tiny", "seed=5", "--print"]) == 0
    shown = capsys.readouterr().out
    assert "seed = 5" in shown
    assert "newton_schulz_steps = 5" in shown


def test_the_74b_preset_is_inspected_in_seconds():
    started = time.monotonic()
    command = [sys.executable, "-m", "openzaya.cli.main", "inspect", "zaya1-74b"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert time.monotonic() - started < 5
    assert "74.79" in shown


def test_overrides_may_follow_options(capsys):
    assert cli.main(["train", "--print", "tiny", "seed=5", "--out", "x", "name=y"]) == 0
    shown = capsys.readouterr().out
    assert "seed = 5" in shown
    assert 'name = "y"' in shown
