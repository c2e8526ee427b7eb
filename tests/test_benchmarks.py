"""Benchmarks are run by hand; that they can be is checked here."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).resolve().parents[1] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_benchmark_finds_what_it_uses(file):
    """A name that has moved is found here, and not on the day that figures are wanted."""
    assert callable(runpy.run_path(str(file))["main"])
