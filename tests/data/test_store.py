from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from openzaya.config.recipe import SourceConfig
from openzaya.data import encode, shard_build
from openzaya.data.encode import split_long
from openzaya.data.shards import TextStore
from openzaya.data.split import is_heldout
from openzaya.data.store import open_store
from openzaya.data.tokenizer import Tokenizer
from openzaya.data.vocabulary import sample
from openzaya.errors import UserError


def source(path: Path, heldout: float = 0.2) -> SourceConfig:
    return SourceConfig(kind="text", path=str(path), separator="|", heldout=heldout)


def texts(store: TextStore, tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    train, heldout = (
        [tokenizer.decode(side.document(i).tolist(), skip_special=False) for i in range(len(side))]
        for side in (store.train, store.heldout)
    )
    return train, heldout


def test_every_document_is_on_its_side_and_ends(
    letters: Path, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    calls: list[tuple[int, int]] = []
    store = open_store(
        "x", source(letters), byte_tokenizer, tmp_path, lambda d, t: calls.append((d, t))
    )
    written = letters.read_text().split("|")
    train, heldout = texts(store, byte_tokenizer)
    held = [is_heldout(i, text, 0.2) for i, text in enumerate(written)]
    assert 2 <= sum(held) <= 16
    assert train == [f"{t}<eos>" for t, h in zip(written, held, strict=True) if not h]
    assert heldout == [f"{t}<eos>" for t, h in zip(written, held, strict=True) if h]
    assert store.train.tokens.dtype == np.uint16
    assert calls[-1] == (40, len(store.train.tokens) + len(store.heldout.tokens))


def test_second_opening_encodes_nothing(
    letters: Path, tmp_path: Path, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_store("x", source(letters), byte_tokenizer, tmp_path)
    monkeypatch.setattr(shard_build, "_Build", lambda *_: pytest.fail("built again"))
    second = open_store("other name", source(letters), byte_tokenizer, tmp_path)
    assert texts(first, byte_tokenizer) == texts(second, byte_tokenizer)


def test_changed_inputs_get_another_folder(
    letters: Path, tmp_path: Path, byte_tokenizer: Tokenizer, tokenizer: Tokenizer
) -> None:
    cache = tmp_path / "cache"
    open_store("x", source(letters), byte_tokenizer, cache)
    open_store("x", source(letters, heldout=0.5), byte_tokenizer, cache)
    open_store("x", source(letters), tokenizer, cache)
    letters.write_text(letters.read_text().replace("a", "z"))
    store = open_store("x", source(letters), byte_tokenizer, cache)
    assert len(list(cache.iterdir())) == 4
    assert "zzzzz<eos>" in [text for side in texts(store, byte_tokenizer) for text in side]


@pytest.mark.parametrize("longer", [False, True])
@pytest.mark.parametrize("name", ["train-00000.tokens", "heldout-00000.offsets", "manifest.json"])
def test_damaged_cache_is_rebuilt(
    letters: Path, tmp_path: Path, byte_tokenizer: Tokenizer, name: str, longer: bool
) -> None:
    cache = tmp_path / "cache"
    whole = texts(open_store("x", source(letters), byte_tokenizer, cache), byte_tokenizer)
    (folder,) = cache.iterdir()
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content + b"more" if longer else content[:-3])
    again = open_store("x", source(letters), byte_tokenizer, cache)
    assert texts(again, byte_tokenizer) == whole
    assert (folder / name).read_bytes() == content
    assert list(cache.iterdir()) == [folder]


@pytest.mark.parametrize(("share", "sides"), [(1e-9, (1, 1)), (0.999999999, (1, 1)), (0.0, (2, 0))])
def test_both_sides_keep_a_document(
    tmp_path: Path, byte_tokenizer: Tokenizer, share: float, sides: tuple[int, int]
) -> None:
    path = tmp_path / "two.txt"
    path.write_text("one|two")
    store = open_store("x", source(path, share), byte_tokenizer, tmp_path / "cache")
    assert (len(store.train), len(store.heldout)) == sides


def test_a_single_document_is_trained_on(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    path = tmp_path / "one.txt"
    path.write_text("only one")
    store = open_store("x", source(path, 1e-9), byte_tokenizer, tmp_path / "cache")
    assert (len(store.train), len(store.heldout)) == (1, 0)


def test_names_of_special_tokens_stay_text(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a<eos>b<|im_start|>")
    plain = SourceConfig(kind="text", path=str(path), heldout=0.0)
    store = open_store("x", plain, byte_tokenizer, tmp_path / "cache")
    assert (np.asarray(store.train.tokens) < 7).tolist() == [False] * 19 + [True]


def test_failed_builds_leave_nothing_behind(
    letters: Path, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    cache = tmp_path / "cache"
    letters.write_bytes(b"\xff")
    with pytest.raises(UserError, match="not UTF-8"):
        open_store("x", source(letters), byte_tokenizer, cache)
    assert not list(cache.iterdir())
    letters.write_text("fine")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write its tokens to the cache"):
        open_store("x", source(letters), byte_tokenizer, tmp_path / "file" / "cache")


def test_long_documents_are_cut_where_no_token_reaches_over(
    play: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "_PIECE_CHARACTERS", 500)
    pieces = split_long(play)
    assert len(pieces) > 50
    assert "".join(pieces) == play
    assert [i for piece in pieces for i in tokenizer.encode(piece)] == tokenizer.encode(play)
    assert split_long("x" * 2000) == ["x" * 2000]


def test_the_ends_of_files_are_held_out(tmp_path, byte_tokenizer):
    folder = tmp_path / "texts"
    folder.mkdir()
    texts = ["".join(chr(97 + (i * k) % 26) for i in range(1000)) for k in (3, 7)]
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text)
    source = SourceConfig(kind="text", path=str(folder), heldout=0.1, heldout_from="end")
    store = open_store("x", source, byte_tokenizer, tmp_path / "cache")
    for side, part in ((store.train, slice(0, 900)), (store.heldout, slice(900, 1000))):
        found = [byte_tokenizer.decode(side.document(i)) for i in range(len(side))]
        assert found == [text[part] for text in texts]
    assert list(sample({"x": source}, 10_000)) == [text[:900] for text in texts]
    (folder / "2.txt").write_text("x")
    with pytest.raises(UserError, match=r"2\.txt is too short to hold out its end"):
        open_store("x", source, byte_tokenizer, tmp_path / "cache")


@pytest.mark.parametrize(
    "fields", [{"kind": "jsonl"}, {"separator": "\n"}, {"heldout": 0.0}, {"kind": "tasks"}]
)
def test_ends_are_of_whole_texts(fields):
    base = {"kind": "text", "path": "x", "heldout_from": "end"}
    with pytest.raises(ValidationError, match="takes the end of whole files"):
        SourceConfig.model_validate({**base, **fields})
