"""The oracle of a build is the one in a single process that was never disturbed."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openzaya.config.recipe import SourceConfig
from openzaya.data import encode, shard_build
from openzaya.data.conversations import ChatEncoder
from openzaya.data.shard_build import Done, build_shards, check_room, estimate
from openzaya.data.shards import open_shards
from openzaya.data.sources import Corpus
from openzaya.data.split import is_heldout
from openzaya.data.tokenizer import Tokenizer
from openzaya.errors import UserError

SHARD = 300


@pytest.fixture
def corpus(tmp_path: Path, play: str, monkeypatch: pytest.MonkeyPatch) -> SourceConfig:
    """About 80 documents in two files of several units each."""
    for module in ("sources", "encode"):
        monkeypatch.setattr(f"openzaya.data.{module}.PIECE_BYTES", 1000)
    folder = tmp_path / "corpus"
    folder.mkdir()
    texts = [text for text in play[:12_000].split("\n\n") if text.strip()]
    for number, part in enumerate((texts[:50], texts[50:])):
        rows = [json.dumps({"id": i, "body": text}) for i, text in enumerate(part)]
        (folder / f"{number}.jsonl").write_text("\n".join(rows) + "\n")
    return SourceConfig(kind="jsonl", path=str(folder), field="body", heldout=0.2)


def build(out: Path, source: SourceConfig, tokenizer: Tokenizer, **options: Any) -> Path:
    build_shards(out, source, "mine", ChatEncoder(tokenizer), SHARD, **options)
    return out


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def whole(tmp_path: Path, corpus: SourceConfig, tokenizer: Tokenizer) -> dict[str, bytes]:
    return content(build(tmp_path / "whole", corpus, tokenizer))


def test_every_document_is_there_in_order(
    tmp_path: Path, corpus: SourceConfig, tokenizer: Tokenizer
) -> None:
    store = open_shards(build(tmp_path / "out", corpus, tokenizer))
    texts = []
    for path in sorted(Path(str(corpus.path)).iterdir()):
        texts += [json.loads(line)["body"] for line in path.read_text().splitlines()]
    for side, held in ((store.train, False), (store.heldout, True)):
        mine = [text for i, text in enumerate(texts) if is_heldout(i, text, 0.2) == held]
        assert len(mine) > 5
        decoded = [tokenizer.decode(side.document(i).tolist()) for i in range(len(side))]
        assert decoded == mine
        assert all(side.document(i)[-1] == tokenizer.eos_id for i in range(len(side)))


@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers_gives_the_same_bytes(
    tmp_path: Path,
    corpus: SourceConfig,
    tokenizer: Tokenizer,
    whole: dict[str, bytes],
    workers: int,
) -> None:
    assert len([name for name in whole if name.startswith("train")]) > 8
    assert content(build(tmp_path / "out", corpus, tokenizer, workers=workers)) == whole
    assert not multiprocessing.active_children()


def test_a_build_that_was_stopped_goes_on(
    tmp_path: Path, corpus: SourceConfig, tokenizer: Tokenizer, whole: dict[str, bytes]
) -> None:
    """Stopped again and again: every time one more unit is let through."""
    out, kept = tmp_path / "out", []
    for _ in range(40):
        calls: list[Done] = []

        def stop(done: Done, calls: list[Done] = calls) -> None:
            calls.append(done)
            if len(calls) == 3:
                raise KeyboardInterrupt

        try:
            build(out, corpus, tokenizer, progress=stop)
        except KeyboardInterrupt:
            kept.append(calls[0].tokens)
            assert not out.exists()
            continue
        break
    assert len(kept) > 3
    assert kept == sorted(set(kept))  # each time it began where the last whole shard ended
    assert content(out) == whole
    assert not (tmp_path / ".out.building").exists()


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "torn journal", "no journal"])
def test_a_damaged_shard_and_all_behind_it_are_made_again(
    tmp_path: Path,
    corpus: SourceConfig,
    tokenizer: Tokenizer,
    whole: dict[str, bytes],
    damage: str,
) -> None:
    out, scratch = tmp_path / "out", tmp_path / ".out.building"

    def stop(done: Done) -> None:
        if done.documents > 60:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(out, corpus, tokenizer, progress=stop)
    victim, journal = scratch / "train-00003.tokens", scratch / "journal.jsonl"
    bytes_ = victim.read_bytes()
    if damage == "flip":
        victim.write_bytes(bytes([bytes_[0] ^ 1]) + bytes_[1:])
    elif damage == "cut":
        victim.write_bytes(bytes_[:-2])
    elif damage == "gone":
        victim.unlink()
    elif damage == "torn journal":
        journal.write_bytes(journal.read_bytes()[:-30])
    else:
        journal.unlink()
    begun: list[Done] = []
    build(out, corpus, tokenizer, progress=begun.append)
    shards = json.loads(whole["manifest.json"])["shards"]
    sizes = [sum(part["tokens"] for s, part in x.items() if s != "text_bytes") for x in shards]
    if damage in ("flip", "cut", "gone"):
        assert begun[0].tokens == sum(sizes[:3])
    elif damage == "no journal":
        assert begun[0].tokens == 0
    else:
        assert begun[0].tokens > sum(sizes[:3])
    assert content(out) == whole


def test_an_unfinished_build_of_other_input_is_refused(
    tmp_path: Path, corpus: SourceConfig, tokenizer: Tokenizer, byte_tokenizer: Tokenizer
) -> None:
    def stop(done: Done) -> None:
        if done.documents > 40:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        build(out, corpus, tokenizer, progress=stop)
    with pytest.raises(UserError, match=r"other input \(tokenizer differ\)"):
        build(out, corpus, byte_tokenizer)
    changed = Path(str(corpus.path)) / "1.jsonl"
    changed.write_text(changed.read_text().replace("a", "b"))
    with pytest.raises(UserError, match=r"other input \(listing differ\)"):
        build(out, corpus, tokenizer)
    shutil.rmtree(tmp_path / ".out.building")
    build(out, corpus, tokenizer)


def test_a_finished_folder_is_left_alone(
    tmp_path: Path, corpus: SourceConfig, tokenizer: Tokenizer, byte_tokenizer: Tokenizer
) -> None:
    out = build(tmp_path / "out", corpus, tokenizer)
    before = content(out)
    build(out, corpus, tokenizer)
    with pytest.raises(UserError, match=r"another build \(tokenizer differ\)"):
        build(out, corpus, byte_tokenizer)
    assert content(out) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["corpus", "out"]


def test_two_builds_of_one_folder(
    tmp_path: Path, corpus: SourceConfig, tokenizer: Tokenizer
) -> None:
    def other(done: Done) -> None:
        with pytest.raises(UserError, match="another process is building"):
            build(tmp_path / "out", corpus, tokenizer)

    build(tmp_path / "out", corpus, tokenizer, progress=other)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_malformed_row_is_named_and_what_is_whole_stays(
    tmp_path: Path, corpus: SourceConfig, tokenizer: Tokenizer, workers: int
) -> None:
    file = Path(str(corpus.path)) / "1.jsonl"
    good = file.read_text()
    lines = good.splitlines()
    file.write_text("\n".join([*lines[:20], "{oops", *lines[21:]]))
    with pytest.raises(UserError, match=r"1\.jsonl:21: not JSON"):
        build(tmp_path / "out", corpus, tokenizer, workers=workers)
    assert not (tmp_path / "out").exists()
    assert len(list((tmp_path / ".out.building").glob("train-*.tokens"))) > 3


def test_a_process_that_dies_is_named(
    tmp_path: Path, corpus: SourceConfig, tokenizer: Tokenizer
) -> None:
    def kill(done: Done) -> None:
        for process in multiprocessing.active_children():
            process.kill()
            process.join()

    with pytest.raises(UserError, match=r"has died \(exit code -9\).*fewer workers"):
        build(tmp_path / "out", corpus, tokenizer, workers=2, progress=kill)


@pytest.mark.parametrize(("share", "empty"), [(1e-9, "heldout"), (1 - 1e-9, "train")])
def test_a_side_that_chance_left_empty_gets_a_document(
    tmp_path: Path, corpus: SourceConfig, tokenizer: Tokenizer, share: float, empty: str
) -> None:
    source = corpus.model_copy(update={"heldout": share})
    out = tmp_path / "out"
    manifest = build_shards(out, source, "mine", ChatEncoder(tokenizer), SHARD)
    assert manifest.documents(empty) == 1
    assert manifest.documents("train") + manifest.documents("heldout") > 60

    stopped = []

    def stop(done: Done) -> None:
        stopped.append(done)
        if len(stopped) == 25:
            raise KeyboardInterrupt

    again = tmp_path / "again"
    with pytest.raises(KeyboardInterrupt):  # in the second round
        build(again, source, tokenizer, progress=stop)
    assert stopped[-1].documents < max(done.documents for done in stopped)
    assert content(build(again, source, tokenizer)) == content(out)


def test_units_are_read_as_the_whole_file_is(
    tmp_path: Path, play: str, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of line ends make it matter where the first separator is found."""
    text = "\ufeff" + play[:20_000].replace("\n\n", "\n\n\n\n\n").replace("e", "é")
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    source = SourceConfig(kind="text", path=str(tmp_path / "a.txt"), separator="\n\n")
    corpus = Corpus(source, "mine")
    for size in (1, 7, 100, 1000):
        monkeypatch.setattr("openzaya.data.sources.PIECE_BYTES", size)
        pieces = list(corpus.pieces())
        assert len(pieces) > 18_000 // max(size, 2000)
        found = [document for piece in pieces for document in corpus.read(piece)]
        assert found == [t for t in text[1:].split("\n\n") if t and not t.isspace()]
        assert sum(piece.nbytes for piece in pieces) == corpus.nbytes()


def test_parquet_and_hub_like_rows_come_in_pieces(
    tmp_path: Path, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [f"text {i}" for i in range(50)]
    table = pyarrow.table({"n": list(range(50)), "text": texts})
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=7)
    corpus = Corpus(SourceConfig(kind="parquet", path=str(tmp_path / "rows.parquet")), "mine")
    pieces = list(corpus.pieces())
    assert len(pieces) == 8
    assert [text for piece in pieces for text in corpus.read(piece)] == texts
    assert [text for piece in reversed(pieces) for text in corpus.read(piece)] != texts


def test_the_estimate_is_near_and_room_is_checked_first(
    tmp_path: Path, corpus: SourceConfig, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = estimate(Corpus(corpus, "mine"), tokenizer)
    out = build(tmp_path / "out", corpus, tokenizer)
    store = open_shards(out)
    tokens = len(store.train.tokens) + len(store.heldout.tokens)
    assert 0.7 * tokens < expected.tokens < 1.4 * tokens
    check_room(expected, out)
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shard_build.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"will take about .* free some room"):
        check_room(expected, tmp_path / "other")


def test_large_vocabularies_take_four_bytes() -> None:
    assert encode.token_dtype(1 << 16) == np.uint16
    assert encode.token_dtype((1 << 16) + 1) == np.uint32
