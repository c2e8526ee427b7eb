"""Many shards are one array, of which no more is read than is asked for."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openzaya.config.recipe import PhaseConfig, SourceConfig
from openzaya.data.batches import DataPlan
from openzaya.data.conversations import ChatEncoder
from openzaya.data.readers import WindowReader
from openzaya.data.rng import Rng
from openzaya.data.shard_build import build_shards
from openzaya.data.shard_writer import ShardWriter
from openzaya.data.shards import (
    MANIFEST,
    DamagedManifest,
    FileRecord,
    Manifest,
    Side,
    Stream,
    open_shards,
    open_side,
    read_manifest,
    verify,
)
from openzaya.data.store import open_store
from openzaya.data.tokenizer import Tokenizer
from openzaya.data.vocabulary import obtain_tokenizer
from openzaya.errors import UserError

CAPACITY = 100


def write(folder: Path, documents: list[list[int]], masks: list[list[int]] | None = None) -> Side:
    """Documents in shards of `CAPACITY` tokens."""
    folder.mkdir()
    shards = []
    with ShardWriter(folder, CAPACITY, masked=masks is not None) as writer:
        for number, ids in enumerate(documents):
            if writer.full(len(ids)):
                shards.append(writer.finish())
            mask = None if masks is None else np.array(masks[number], np.uint8)
            writer.add("train", np.array(ids, np.uint16), 0, mask)
        shards.append(writer.finish())
    record = FileRecord(0, "", "")
    found = [shard for shard in shards if shard is not None]
    manifest = Manifest("uint16", "", record, 9, {}, 0.0, CAPACITY, masks is not None, found)
    return open_side(folder, manifest, "train")


@pytest.fixture
def drawn() -> list[list[int]]:
    """60 documents of 1 to 40 tokens, and one that is longer than a shard."""
    rng = Rng("documents")
    made = [[rng.below(50_000) for _ in range(rng.between(1, 40))] for _ in range(60)]
    made.insert(17, [rng.below(50_000) for _ in range(250)])
    return made


def test_shards_are_one_array(tmp_path: Path, drawn: list[list[int]]) -> None:
    side = write(tmp_path / "shards", drawn)
    flat = [i for ids in drawn for i in ids]
    edges = [0, *itertools.accumulate(map(len, drawn))]
    assert len(list((tmp_path / "shards").glob("*.tokens"))) > 10
    assert (len(side), len(side.tokens), len(side.offsets)) == (61, len(flat), 62)
    assert np.asarray(side.tokens).tolist() == flat
    assert np.asarray(side.offsets).tolist() == edges
    assert [side.document(i).tolist() for i in range(61)] == drawn
    assert (side.tokens[-1], side.offsets[61]) == (flat[-1], len(flat))
    rng = Rng("slices")
    for _ in range(200):
        start = rng.below(len(flat))
        stop = rng.between(start, len(flat))
        assert side.tokens[start:stop].tolist() == flat[start:stop]
        inside = [edge for edge in edges[:-1] if start <= edge < stop]
        assert side.starts(start, stop).tolist() == inside
    with pytest.raises(IndexError):
        side.offsets[62]


def test_shards_are_cut_at_documents(tmp_path: Path, drawn: list[list[int]]) -> None:
    write(tmp_path / "shards", drawn)
    sizes = [p.stat().st_size // 2 for p in sorted((tmp_path / "shards").glob("*.tokens"))]
    assert sorted(sizes)[-2] <= CAPACITY
    assert max(sizes) == 250
    assert all(a + b > CAPACITY for a, b in itertools.pairwise(sizes))  # none could be joined


def test_windows_do_not_notice_shards(tmp_path: Path, drawn: list[list[int]]) -> None:
    many = write(tmp_path / "many", drawn)
    one = write(tmp_path / "one", [[i for ids in drawn for i in ids]])
    assert len(list((tmp_path / "one").glob("*.tokens"))) == 1
    readers = [WindowReader(side, 33, "x", 3) for side in (many, one)]
    for k in range(100):
        a, b = (reader.row(k) for reader in readers)
        assert (a.tokens == b.tokens).all()
        assert (a.positions == 0).sum() >= (b.positions == 0).sum()


def test_a_mask_lies_beside_the_tokens(tmp_path: Path, drawn: list[list[int]]) -> None:
    masks = [[i % 2 for i in ids] for ids in drawn]
    side = write(tmp_path / "shards", drawn, masks)
    assert side.mask is not None
    assert np.asarray(side.mask).tolist() == (np.asarray(side.tokens) % 2).tolist()
    start, stop = side.offsets[17:19]
    assert side.mask[start:stop].tolist() == masks[17]
    with (
        ShardWriter(tmp_path / "shards", 9, masked=True, number=99) as writer,
        pytest.raises(ValueError, match="a mask belongs to every document"),
    ):
        writer.add("train", np.zeros(3, np.uint16), 0)


@pytest.fixture
def folder(letters: Path, tmp_path: Path, byte_tokenizer: Tokenizer) -> Path:
    source = SourceConfig(kind="text", path=str(letters), separator="|", heldout=0.2)
    build_shards(
        tmp_path / "shards", source, "letters", ChatEncoder(byte_tokenizer), shard_tokens=150
    )
    return tmp_path / "shards"


def shards(folder: Path, **more: Any) -> SourceConfig:
    return SourceConfig(kind="shards", path=str(folder), **more)


def phase(mixture: dict[str, float], context: int) -> PhaseConfig:
    return PhaseConfig(
        name="p",
        steps=5,
        context=context,
        batch_sequences=4,
        micro_sequences=1,
        mixture=mixture,
        lr=1.0,
        lr_final=0.0,
    )


def test_batches_are_those_of_the_text(
    folder: Path, letters: Path, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    text = SourceConfig(kind="text", path=str(letters), separator="|", heldout=0.2)
    plans = [
        DataPlan(
            {"a": source, "b": source.model_copy(update={"whole": True})},
            [phase({"a": 0.5, "b": 0.5}, 48)],
            byte_tokenizer,
            tmp_path / "cache",
            7,
        )
        for source in (text, shards(folder))
    ]
    for step in (0, 1, 50):
        a, b = (plan.batch(0, step) for plan in plans)
        assert (a.tokens == b.tokens).all()
        assert (a.targets == b.targets).all()
        assert (a.positions == b.positions).all()
    a, b = (plan.heldout("a", 16, 3) for plan in plans)
    assert (a.tokens == b.tokens).all()


def test_only_the_rows_that_are_needed_are_read(
    folder: Path, tmp_path: Path, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row touches its own window, and nothing of a source whose turn it is not."""
    touched: list[tuple[Stream, int]] = []
    copy = Stream._copy

    def counting(self: Stream, shard: int, start: int, stop: int) -> Any:
        touched.append((self, stop - start))
        return copy(self, shard, start, stop)

    monkeypatch.setattr(Stream, "_copy", counting)
    sources, context = {"a": shards(folder), "b": shards(folder)}, 20
    plan = DataPlan(
        sources, [phase({"a": 0.7, "b": 0.3}, context)], byte_tokenizer, tmp_path / "cache", 0
    )
    assert not touched  # set-up looks at sizes alone
    turns = set()
    for slot in range(40):
        touched.clear()
        name, _ = plan._mixtures[0].assign(slot)
        turns.add(name)
        plan.rows(0, slot // 4, slot % 4, slot % 4 + 1)
        side = plan.stores[name].train
        assert {stream for stream, _ in touched} <= {side.tokens, side.offsets}
        assert sum(n for stream, n in touched if stream is side.tokens) == context + 1
        assert sum(n for stream, n in touched if stream is side.offsets) <= 4  # 6 tokens or more
    assert turns == {"a", "b"}


def test_opening_reads_no_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "_open", lambda *_: pytest.fail("opened"))
    store = open_shards(folder)
    assert len(store.train) + len(store.heldout) == 40


def test_few_files_are_open_at_once(
    tmp_path: Path, drawn: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openzaya.data.shards.OPEN_FILES", 2)
    side = write(tmp_path / "shards", drawn)
    assert np.asarray(side.tokens).tolist() == [i for ids in drawn for i in ids]
    assert side.tokens._map.cache_info().currsize == 2  # type: ignore[attr-defined]


def test_another_tokenizer_is_refused(
    folder: Path, tmp_path: Path, byte_tokenizer: Tokenizer, tokenizer: Tokenizer
) -> None:
    with pytest.raises(UserError, match=r"'web': the shards .* another tokenizer .*build them"):
        open_store("web", shards(folder), tokenizer, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_run_takes_the_tokenizer_of_its_shards(
    folder: Path, letters: Path, tmp_path: Path, byte_tokenizer: Tokenizer, tokenizer: Tokenizer
) -> None:
    from openzaya.config.recipe import TokenizerConfig

    text = SourceConfig(kind="text", path=str(letters), separator="|")
    sources = {"text": text, "web": shards(folder)}
    found = obtain_tokenizer(TokenizerConfig(), sources)
    assert found.digest == byte_tokenizer.digest
    build_shards(tmp_path / "other", text, "x", ChatEncoder(tokenizer))
    sources["books"] = shards(tmp_path / "other")
    with pytest.raises(UserError, match="'web' and 'books' were made with different tokenizers"):
        obtain_tokenizer(TokenizerConfig(), sources)


def test_shards_without_a_heldout_side(
    letters: Path, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    text = SourceConfig(kind="text", path=str(letters), separator="|", heldout=0.0)
    build_shards(tmp_path / "all", text, "x", ChatEncoder(byte_tokenizer))
    sources = {"web": shards(tmp_path / "all")}
    plan = DataPlan(sources, [phase({"web": 1.0}, 16)], byte_tokenizer, tmp_path, 0)
    assert plan.batch(0, 0).real_tokens == 64
    with pytest.raises(UserError, match="'web': its shards have no held-out documents"):
        plan.heldout("web", 16, 2)


def test_every_damaged_file_is_named(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert verify(folder, manifest) == []
    for name, _ in list(manifest.files()):
        whole = (folder / name).read_bytes()
        flipped = bytes([whole[0] ^ 1]) + whole[1:]
        for content in (flipped, whole[:-1]):
            (folder / name).write_bytes(content)
            for quick in (False, True):
                (problem,) = verify(folder, manifest, quick)
                assert problem.startswith(f"{name} ")
        with pytest.raises(UserError, match=f"not whole: {name} has"):
            open_shards(folder)
        (folder / name).unlink()
        assert verify(folder, manifest) == [f"{name} is missing"]
        (folder / name).write_bytes(whole)


def test_damaged_and_foreign_manifests(folder: Path) -> None:
    path = folder / MANIFEST
    whole = path.read_text()
    for text in (
        whole[:-20],
        "[]",
        whole.replace('"uint16"', '"uint32"'),
        whole.replace('"documents": ', '"documents": 1'),
    ):
        path.write_text(text)
        with pytest.raises(DamagedManifest, match="is damaged"):
            read_manifest(folder)
    path.write_text(json.dumps({**json.loads(whole), "format": 99}))
    with pytest.raises(UserError, match="is of format 99"):
        read_manifest(folder)
    path.unlink()
    with pytest.raises(UserError, match="no folder of token shards"):
        read_manifest(folder)
