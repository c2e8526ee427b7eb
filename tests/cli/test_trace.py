from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from openzaya.checkpoint.save import save_model
from openzaya.checkpoint.trace_file import GOLDEN, GOLDEN_TRACE, read_trace
from openzaya.cli import trace
from openzaya.errors import UserError
from tests.checkpoint.golden_trace import golden_model
from tests.model.helpers import small_model


def parse(*argv: str | Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    trace.add_arguments(parser)
    return parser.parse_args([str(part) for part in argv])


def run(*argv: str | Path) -> int:
    return trace.run(parse(*argv))


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden checkpoint with a mistake: its second layer's temperature."""
    model = golden_model()
    with torch.no_grad():
        model.model.layers[1].self_attn.qk_norm.temp.mul_(1.01)
    folder = tmp_path_factory.mktemp("wrong")
    save_model(model, folder)
    return folder


def test_write_and_compare_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: Path
) -> None:
    file = tmp_path / "trace.safetensors"
    assert run("golden", "--out", file) == 0
    assert "wrote 75 stages" in capsys.readouterr().out
    assert len(read_trace(file, complete=True).tensors) == 75
    for source in ("golden", GOLDEN, file):
        assert run(source, "--compare", file) == 0
        assert run(source, "--compare", "golden") == 0
        assert "in all 75 stages" in capsys.readouterr().out
    assert run(wrong, "--compare", file) == 1
    assert "first at layers.1.attention.k_normed" in capsys.readouterr().out.replace("\n", " ")
    assert run(wrong, "--compare", file, "--tolerance", "0.5") == 0


def test_a_checkpoint_runs_on_the_inputs_of_the_reference(tmp_path: Path) -> None:
    """The probe of another sliding window is shorter; what is compared is the same."""
    folder, file = tmp_path / "model", tmp_path / "trace.safetensors"
    folder.mkdir()
    save_model(small_model(sliding_window=16), folder)
    assert run(folder, "--out", file) == 0
    long = read_trace(file).probe.tokens.shape[1]
    save_model(small_model(sliding_window=4), folder)
    both = tmp_path / "both.safetensors"
    assert run(folder, "--out", both, "--compare", file) == 1
    assert read_trace(both).probe.tokens.shape[1] == long == 32


def test_a_port_may_leave_stages_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a file of another implementation: the golden metadata, some stages, one of its own."""
    tensors = {
        name: tensor
        for name, tensor in load_file(GOLDEN_TRACE).items()
        if not name.endswith(("convolved", "margin"))
    }
    metadata = {"format": "openzaya-trace", "version": "1"}
    metadata["config"] = golden_model().config.model_dump_json()
    port = tmp_path / "port.safetensors"
    save_file({**tensors, "mine": torch.zeros(1)}, port, metadata)
    assert run(port, "--compare", "golden") == 0
    out = capsys.readouterr().out
    assert "not in the other trace: layers.0.attention.q_convolved," in out
    assert "only in the other trace: mine" in out
    assert "in all 66 stages" in out
    assert run("golden", "--compare", port) == 0

    chosen = tensors["layers.2.router.chosen"]
    chosen[3, 6] = wanted = (int(chosen[3, 6]) + 1) % 5
    save_file(tensors, port, metadata)
    capsys.readouterr()
    assert run(port, "--compare", "golden", "--json") == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["first"] == "layers.2.router.chosen"
    [flip] = shown["flips"]
    assert (flip["row"], flip["column"], flip["other"], flip["near_tie"]) == (3, 6, wanted, False)


@pytest.mark.parametrize("tolerance", ["1e-3", "5e-2"])
def test_tables_fit_80_columns(
    tolerance: str, capsys: pytest.CaptureFixture[str], wrong: Path
) -> None:
    for source in ("golden", str(wrong)):
        code = run(source, "--dtype", "bfloat16", "--compare", "golden", "--tolerance", tolerance)
        assert code == (tolerance == "1e-3")
        out = capsys.readouterr().out
        lines = out.replace(str(wrong), "wrong").splitlines()
        assert max(map(len, lines)) <= 80
        assert "…" not in out
        assert "near tie" in out
        assert ("!" in out.splitlines()[4]) == (tolerance == "1e-3")


def test_json_of_a_comparison(capsys: pytest.CaptureFixture[str], wrong: Path) -> None:
    assert run(wrong, "--compare", "golden", "--json") == 1
    shown = json.loads(capsys.readouterr().out)
    assert (shown["agrees"], shown["first"]) == (False, "layers.1.attention.k_normed")
    assert shown["reference"] == "golden"
    stage = next(s for s in shown["stages"] if s["name"] == shown["first"])
    assert stage["drift"] == pytest.approx(0.01, rel=1e-3)
    assert stage["tokens"] == shown["tokens"] == 69


def test_json_of_a_new_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("golden", "--out", tmp_path / "t", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["stages"][0] == "embedded"
    assert shown["stages"][-1] == "logits"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["golden"], "nothing to do"),
        (["/nowhere", "--compare", "golden"], "/nowhere is no folder"),
        (["golden", "--compare", "/nowhere"], "/nowhere is no file"),
        (["golden", "--compare", str(GOLDEN / "config.json")], "damaged or no safetensors"),
        (["golden", "--compare", str(GOLDEN / "model.safetensors")], "is no trace"),
        ([str(GOLDEN_TRACE), "--out", "x"], "is a trace already; --out"),
        (
            [str(GOLDEN_TRACE), "--compare", "golden", "--dtype", "bfloat16"],
            "is a trace already; --dtype",
        ),
        (["golden", "--compare", "golden", "--tolerance", "-1"], "--tolerance is -1"),
        (["golden", "--compare", "golden", "--tolerance", "nan"], "--tolerance is nan"),
    ],
)
def test_bad_input(argv: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(*argv)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no model"):
        run(tmp_path, "--compare", "golden")


def test_help_teaches_by_example_and_needs_no_torch() -> None:
    code = (
        "import argparse, sys; from openzaya.cli import trace as t; "
        "p = argparse.ArgumentParser(); t.add_arguments(p); print(p.format_help()); "
        "sys.exit('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "openzaya trace port.safetensors --compare golden" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 100
