"""Benchmarks are run by hand; that they can be is checked here."""

from __future__ import annotations

import importlib
import runpy
from pathlib import Path

import pytest

from openzaya.model.config import PRESETS

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
FILES = sorted(file for file in FOLDER.glob("*.py") if file.stem != "common")


@pytest.fixture
def bench(monkeypatch):
    """The folder of benchmarks, importable as it is for a script."""
    monkeypatch.syspath_prepend(FOLDER)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_benchmark_finds_what_it_uses(file, bench):
    """A name that has moved is found here, and not on the day that figures are wanted."""
    assert callable(runpy.run_path(str(file))["main"])


def test_both_sides_train_the_same_model_on_the_same_data(bench):
    """What is compared computes the same, step after step."""
    common = importlib.import_module("common")
    job = common.Job(config=PRESETS["tiny"], batch=2, context=32, threads=1, dtype="fp32")
    peer = job.model_copy(update={"side": "peer"})
    results = common.alternate({"ours": job, "peer": peer}, rounds=2, steps=1, warmup=1)
    ours, theirs = results["ours"], results["peer"]
    assert len(ours.losses) == 3  # one that is not counted, and two turns
    assert len(ours.seconds) == 2
    assert ours.losses == pytest.approx(theirs.losses, abs=1e-4)
    assert ours.peak_mib > 0


def test_a_worker_that_ends_says_why(bench):
    common = importlib.import_module("common")
    job = common.Job(config=PRESETS["tiny"], context=0)
    with (
        pytest.raises(common.WorkerFailed, match="ended with 1: IndexError"),
        common.Worker(job) as worker,
    ):
        worker.ask("steps")


def test_ratios_pair_turns(bench):
    """A machine that is twice as slow in the second turn changes no ratio."""
    measured = importlib.import_module("common").Measured
    ours = measured(rounds=[[[0.5, 0.0, 0.5, 0.0]], [[1.0, 0.0, 1.0, 0.0]]])
    peer = measured(rounds=[[[1.0, 0.0, 2.0, 0.0]], [[2.0, 0.0, 4.0, 0.0]]])
    assert peer.ratio_to(ours) == pytest.approx(3.0)


def test_growth_is_judged_between_any_two_rows(bench):
    """A dear first row does not hide that a later one grew more than it should."""
    worst = runpy.run_path(str(FOLDER / "train_growth.py"))["worst"]
    rows = [{"due": d, "took": t} for d, t in ((1, 1.0), (2, 1.5), (4, 4.5))]
    assert worst(rows) == pytest.approx(1.5)
