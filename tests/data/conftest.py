from __future__ import annotations

from pathlib import Path

import pytest

from openzaya.data.sources import CORPUS
from openzaya.data.tokenizer import SMALLEST_VOCABULARY, Tokenizer


@pytest.fixture(scope="session")
def play() -> str:
    return (CORPUS / "tinyshakespeare.txt").read_text(encoding="utf-8")[:60_000]


@pytest.fixture(scope="session")
def tokenizer(play: str) -> Tokenizer:
    """A small tokenizer with some merges."""
    return Tokenizer.train([play], 400)


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    """One token a byte, so that lengths are known and golden values depend on no training."""
    return Tokenizer.train([], SMALLEST_VOCABULARY)


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    """A file of 40 documents, `aaa...`, `bbb...` and so on, 5 to 44 letters long, cut at `|`."""
    path = tmp_path / "letters.txt"
    alphabet = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN"
    path.write_text("|".join(letter * (5 + i) for i, letter in enumerate(alphabet)))
    return path
