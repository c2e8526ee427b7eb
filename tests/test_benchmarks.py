"""Benchmarks are run by hand; that they can be is checked here."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
FILES = sorted(file for file in FOLDER.glob("*.py") if file.stem != "common")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_benchmark_finds_what_it_uses(file, monkeypatch):
    """A name that has moved is found here, and not on the day that figures are wanted."""
    monkeypatch.syspath_prepend(FOLDER)  # as Python does for a script
    assert callable(runpy.run_path(str(file))["main"])
