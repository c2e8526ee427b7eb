import json

import pytest
from rich.console import Console

from openzaya.demo import demo
from openzaya.demo.demo import run_demo
from openzaya.errors import UserError

TINY = [
    "model.hidden_size=64",
    "model.num_hidden_layers=2",
    "model.vocab_size=512",
    "tokenizer.vocab_size=512",
    "tokenizer.sample_bytes=200000",
    "sources.python.kind=bundled",
    "sources.python.path=tinyshakespeare.txt",
    "run.tensorboard=false",
    "run.eval_sequences=2",
]


def test_the_demo_trains_reports_and_does_not_repeat(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "measure_rate", lambda recipe: 500.0)  # a plan of a few steps
    folder = run_demo(0.2, tmp_path, Console(width=80), TINY, exam_problems=14)
    shown = capsys.readouterr().out
    for word in ("text", "maths", "reason", "held-out loss", "held-out problems", "chance"):
        assert word in shown
    assert max(map(len, shown.splitlines())) <= 80
    report = json.loads((folder / "report.json").read_text())
    assert report["exam"]["overall"]["total"] == 14
    assert set(report["heldout_loss"]["last"]) == {"plays", "python", "worked", "reasoning"}

    def never(*args):
        raise AssertionError("finished work was repeated")

    monkeypatch.setattr(demo, "measure_rate", never)
    monkeypatch.setattr(demo, "take_exam", never)
    run_demo(0.2, tmp_path, Console(width=80))
    assert "held-out problems" in capsys.readouterr().out
    (folder / "report.json").write_text("{")
    monkeypatch.undo()
    run_demo(0.2, tmp_path, Console(width=80), exam_problems=7)
    assert json.loads((folder / "report.json").read_text())["exam"]["overall"]["total"] == 7
    with pytest.raises(UserError, match="names its own run"):
        run_demo(0.3, tmp_path, Console(), ["name=mine"])
    with pytest.raises(UserError, match="comes too late"):
        run_demo(0.2, tmp_path, Console(), ["seed=3"])
