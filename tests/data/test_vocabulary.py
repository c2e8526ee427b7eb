from __future__ import annotations

from pathlib import Path

from openzaya.config.recipe import SourceConfig, TokenizerConfig
from openzaya.data.tokenizer import Tokenizer
from openzaya.data.vocabulary import obtain_tokenizer, sample


def test_a_given_file_is_read(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(tmp_path / "t.json")
    config = TokenizerConfig(path=str(tmp_path / "t.json"))
    assert obtain_tokenizer(config, {}).digest == tokenizer.digest


def test_every_source_has_its_share() -> None:
    sources = {
        "play": SourceConfig(kind="bundled", path="tinyshakespeare.txt"),
        "sums": SourceConfig(kind="tasks", tasks=("add",)),
    }
    texts = list(sample(sources, 20_000))
    sums = [text for text in texts if "boxed" in text]
    assert 9_900 < sum(map(len, sums)) < 10_200
    assert 9_900 < sum(map(len, texts)) - sum(map(len, sums)) < 10_200
    trained = obtain_tokenizer(TokenizerConfig(vocab_size=500, sample_bytes=40_000), sources)
    assert trained.vocab_size == 500
    assert len(trained.encode(" answer")) == 1


def test_heldout_documents_teach_nothing(letters: Path) -> None:
    def read(share: float) -> list[str]:
        source = SourceConfig(kind="text", path=str(letters), separator="|", heldout=share)
        return list(sample({"x": source}, 10_000))

    assert len(read(0.0)) == 40
    assert len(read(0.5)) < 30
