from __future__ import annotations

import builtins
import json
import sys
import sysconfig
import types
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from openzaya.config.recipe import SourceConfig
from openzaya.data.sources import documents, fingerprint, group
from openzaya.errors import UserError


def read(kind: Any, path: Path | str | None, **options: Any) -> list[str]:
    source = SourceConfig(kind=kind, path=None if path is None else str(path), **options)
    return list(documents(source, "mine"))


def test_text_file_folder_glob_and_separator(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("beta")
    (tmp_path / "a.txt").write_text("\ufeffone###  \n###two")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "c.md").write_text("gamma")
    (tmp_path / ".hidden").write_text("no")
    assert read("text", tmp_path / "b.txt") == ["beta"]
    assert read("text", tmp_path) == ["one###  \n###two", "beta", "gamma"]
    assert read("text", tmp_path / "*.txt", separator="###") == ["one", "two", "beta"]


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'mine'.*nowhere\.txt"):
        read("text", tmp_path / "nowhere.txt")
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(UserError, match=r"'mine'.*no text"):
        read("text", tmp_path / "blank.txt")


def test_undecodable_text_names_file_and_byte(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes("dé".encode() + b"ok\xff")
    with pytest.raises(UserError, match=r"bad\.txt is not UTF-8 text at byte 5"):
        read("text", tmp_path / "bad.txt")


def test_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a", "id": 1}\n\n{"text": null}\n{"text": "b"}\n')
    assert read("jsonl", path) == ["a", "b"]
    with pytest.raises(UserError, match=r"rows\.jsonl:1: no column 'body'; there are text, id"):
        read("jsonl", path, field="body")
    with pytest.raises(UserError, match=r"rows\.jsonl:1: column 'id' holds int"):
        read("jsonl", path, field="id")


@pytest.mark.parametrize(("line", "what"), [("{oops", "not JSON"), ("[1]", "must be an object")])
def test_malformed_jsonl_names_the_line(tmp_path: Path, line: str, what: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n' + line)
    with pytest.raises(UserError, match=rf"rows\.jsonl:2: .*{what}"):
        read("jsonl", path)


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": ["a", None, "b"], "n": [1, 2, 3]}), path)
    assert read("parquet", path) == ["a", "b"]
    with pytest.raises(UserError, match=r"no column 'body'; there are text, n"):
        read("parquet", path, field="body")
    path.write_bytes(b"not parquet at all")
    with pytest.raises(UserError, match="not a readable parquet file"):
        read("parquet", path)


@pytest.mark.parametrize(
    ("kind", "module", "extra"), [("parquet", "pyarrow", "parquet"), ("hub", "datasets", "hub")]
)
def test_missing_extras_say_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, module: str, extra: str
) -> None:
    original = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == module:
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    path = tmp_path / "x.parquet"
    path.touch()
    with pytest.raises(UserError, match=rf"pip install 'openzaya\[{extra}\]'"):
        read(kind, path)


def test_hub_passes_split_and_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(path: str, split: str, revision: str | None) -> list[dict[str, str]]:
        asked.append((path, split, revision))
        if path == "broken":
            raise ValueError("no such thing")
        return [{"body": "x"}, {"body": "y"}]

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    assert read("hub", "some/set", field="body", split="test", revision="abc") == ["x", "y"]
    assert asked == [("some/set", "test", "abc")]
    with pytest.raises(UserError, match=r"'broken'.*no such thing"):
        read("hub", "broken")


def test_bundled_documents_are_about_two_thousand_characters() -> None:
    found = read("bundled", "tinyshakespeare.txt")
    lengths = [len(document) for document in found]
    assert 1_500 < sum(lengths) / len(lengths) < 2_100
    assert found[0].startswith("First Citizen:\nBefore we proceed")
    with pytest.raises(UserError, match=r"'nothing'; there is .*tinyshakespeare\.txt"):
        read("bundled", "nothing")


def test_group_joins_and_never_cuts() -> None:
    parts = ["a" * 5, "b" * 5, "c" * 50, "d"]
    assert list(group(parts, 20)) == ["aaaaa\n\nbbbbb", "c" * 50, "d"]
    assert list(group([], 20)) == []


def test_stdlib_is_sorted_and_leaves_tests_out() -> None:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = read("stdlib", None)
    places = [found.index((root / name).read_text()) for name in ("abc.py", "json/tool.py")]
    assert places == sorted(places)
    assert found[-1] == topics[max(topics)]
    assert (root / "idlelib" / "run.py").read_text() not in found


def test_fingerprint_follows_the_content(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "a"}))
    source = SourceConfig(kind="jsonl", path=str(path))
    before = fingerprint(source, "x")
    assert fingerprint(source, "x") == before
    path.write_text(json.dumps({"text": "b"}))
    assert fingerprint(source, "x") != before
