from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from openzaya.checkpoint.save import save_model
from openzaya.cli import inspect
from openzaya.errors import UserError
from openzaya.model.config import PRESETS
from openzaya.model.model import Zaya


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    inspect.add_arguments(parser)
    return parser.parse_args(argv)


@pytest.mark.parametrize("name", PRESETS)
def test_tables_fit_80_columns(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect.run(parse(name)) == 0
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()[1:]) <= 80
    assert "…" not in out


def test_published_counts_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    inspect.run(parse("zaya1-8b"))
    out = capsys.readouterr().out
    for figure in ("8.840 B", "8.303 B", "1.291 B", "753.6 M", "40,960", "8x"):
        assert figure in out


def test_json_of_a_checkpoint_and_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoints" / "step-00000007"
    folder.mkdir(parents=True)
    save_model(Zaya(PRESETS["tiny"]), folder)
    totals = []
    for where in (folder, tmp_path, "tiny"):
        inspect.run(parse(str(where), "--json", "--context", "64", "--batch", "2"))
        data = json.loads(capsys.readouterr().out)
        assert data["context"] == 64
        totals.append(data["parameters"]["total"])
    assert len(set(totals)) == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["zaya2"], "Presets: tiny, small, zaya1-8b, zaya1-74b"),
        (["tiny", "--context", "0"], "--context is 0"),
        (["tiny", "--batch", "-1"], "--batch is -1"),
    ],
)
def test_bad_input(argv: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        inspect.run(parse(*argv))


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json"):
        inspect.run(parse(str(tmp_path)))


def test_the_largest_preset_is_instant() -> None:
    """No torch, no tensors: the whole process answers at once."""
    code = (
        "import argparse, sys; from openzaya.cli import inspect as i; "
        "p = argparse.ArgumentParser(); i.add_arguments(p); "
        "i.run(p.parse_args(['zaya1-74b'])); assert 'torch' not in sys.modules"
    )
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert time.monotonic() - start < 5
