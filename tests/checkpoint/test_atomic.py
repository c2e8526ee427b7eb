"""Folders and files that appear whole or not at all."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from openzaya.checkpoint.atomic import atomic_folder, write_text
from openzaya.checkpoint.manifest import MANIFEST, verify
from openzaya.errors import UserError


def _write(path: Path, content: str = "new") -> None:
    with atomic_folder(path) as folder:
        (folder / "a.txt").write_text(content)
        (folder / "deep").mkdir()
        (folder / "deep" / "b.bin").write_bytes(bytes(range(256)))


def _names(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def test_a_folder_appears_whole(tmp_path):
    target = tmp_path / "new" / "folder"
    with atomic_folder(target) as scratch:
        (scratch / "a.txt").write_text("x")
        assert not target.exists()
    assert _names(target) == {"a.txt", MANIFEST}
    assert verify(target) == []
    assert os.listdir(target.parent) == ["folder"]


def test_verify_names_what_is_wrong(tmp_path):
    _write(tmp_path / "x")
    folder = tmp_path / "x"
    assert verify(folder) == []
    (folder / "a.txt").write_text("nEw")
    assert verify(folder) == ["a.txt is damaged: its SHA-256 does not match the manifest"]
    (folder / "a.txt").write_text("longer")
    assert verify(folder) == ["a.txt has 6 bytes, not 3"]
    (folder / "deep" / "b.bin").unlink()
    assert len(verify(folder)) == 2
    (folder / MANIFEST).unlink()
    assert verify(folder) == [f"{MANIFEST} is missing"]
    assert verify(tmp_path / "absent") == [f"{MANIFEST} is missing"]


def test_every_flipped_byte_is_caught(tmp_path):
    """One bit, in any byte of any file, the manifest's own bytes included."""
    _write(tmp_path / "x")
    for name in sorted(_names(tmp_path / "x")):
        file = tmp_path / "x" / name
        content = file.read_bytes()
        for at in range(len(content)):
            flipped = bytearray(content)
            flipped[at] ^= 1
            file.write_bytes(flipped)
            assert verify(tmp_path / "x"), f"byte {at} of {name} may change unnoticed"
        file.write_bytes(content)
    assert verify(tmp_path / "x") == []


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{}", '{"files": []}', '{"files": {"a.txt": {}}}']
)
def test_a_damaged_manifest_is_a_problem_and_no_crash(text, tmp_path):
    _write(tmp_path / "x")
    (tmp_path / "x" / MANIFEST).write_text(text)
    assert verify(tmp_path / "x")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("existing", [False, True])
def test_an_interrupted_write_leaves_nothing(tmp_path, error, existing):
    """What was there before stays as it was; of the new content nothing remains."""
    if existing:
        _write(tmp_path / "x", "old")

    def interrupted() -> None:
        with atomic_folder(tmp_path / "x") as folder:
            (folder / "a.txt").write_text("new")
            raise error("stop")

    with pytest.raises(error):
        interrupted()
    assert os.listdir(tmp_path) == (["x"] if existing else [])
    if existing:
        assert verify(tmp_path / "x") == []
        assert (tmp_path / "x" / "a.txt").read_text() == "old"


def test_a_rewrite_replaces_everything(tmp_path):
    with atomic_folder(tmp_path / "x") as folder:
        (folder / "stale.txt").write_text("x")
    _write(tmp_path / "x")
    assert _names(tmp_path / "x") == {"a.txt", "deep/b.bin", MANIFEST}
    assert verify(tmp_path / "x") == []
    assert os.listdir(tmp_path) == ["x"]


def test_leftovers_of_a_killed_writer_are_cleared(tmp_path):
    scratch = tmp_path / ".x.incomplete"
    scratch.mkdir()
    (scratch / "junk").write_text("half")
    _write(tmp_path / "x")
    assert os.listdir(tmp_path) == ["x"]
    assert "junk" not in _names(tmp_path / "x")


def test_the_old_folder_returns_when_the_last_rename_fails(tmp_path, monkeypatch):
    _write(tmp_path / "x", "old")
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name == ".x.incomplete":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(UserError, match="Input/output error"):
        _write(tmp_path / "x", "new")
    assert verify(tmp_path / "x") == []
    assert (tmp_path / "x" / "a.txt").read_text() == "old"
    assert os.listdir(tmp_path) == ["x"]


def test_a_writer_killed_between_its_renames_loses_nothing(tmp_path, monkeypatch):
    """Between setting the old folder aside and showing the new one, power may fail. The next
    writer that is interrupted must not leave the user with neither."""
    _write(tmp_path / "x", "old")
    (tmp_path / "x").rename(tmp_path / ".x.old")
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "x"):
        raise RuntimeError
    survivors = [p for p in (tmp_path / "x", tmp_path / ".x.old") if p.exists()]
    assert survivors
    assert verify(survivors[0]) == []


def test_unwritable_place_is_a_readable_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot write"):
        _write(tmp_path / "file" / "x")
    with pytest.raises(UserError, match="cannot write"):
        write_text(tmp_path / "file" / "x", "text")


def test_write_text(tmp_path):
    file = tmp_path / "deep" / "file.json"
    write_text(file, "öne")
    write_text(file, "two")
    assert file.read_text(encoding="utf-8") == "two"
    assert os.listdir(file.parent) == ["file.json"]


# A full disk, by a limit on the size of files that the system enforces

LIMITED = """
import resource, signal, sys
from pathlib import Path
import torch
from openzaya.checkpoint.atomic import atomic_folder, write_text
from openzaya.checkpoint.save import save_model
from openzaya.errors import UserError
from openzaya.model.config import PRESETS
from openzaya.model.model import Zaya

target, kind = Path(sys.argv[1]), sys.argv[2]
model = Zaya(PRESETS["tiny"])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    if kind == "text":
        write_text(target, "x" * 200_000)
    else:
        with atomic_folder(target) as folder:
            if kind == "safetensors":
                save_model(model, folder)
            elif kind == "pickle":
                torch.save(model.state_dict(), folder / "state.pt")
            else:
                (folder / "plain.bin").write_bytes(bytes(200_000))
except UserError as error:
    print("UserError:", error)
    sys.exit(7)
"""


@pytest.mark.parametrize("kind", ["safetensors", "pickle", "bytes", "text"])
def test_a_full_disk(kind, tmp_path):
    """The system itself cuts the write off; the message says so and nothing half-written stays."""
    target = tmp_path / "room" / "x"
    target.parent.mkdir()
    if kind == "text":
        target.write_text("old")
    else:
        _write(target, "old")
    result = subprocess.run(
        [sys.executable, "-c", LIMITED, str(target), kind],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 7, result.stdout + result.stderr
    assert f"cannot write {target}" in result.stdout
    assert os.listdir(target.parent) == ["x"]
    if kind == "text":
        assert target.read_text() == "old"
    else:
        assert verify(target) == []
        assert (target / "a.txt").read_text() == "old"


def test_the_limit_is_what_stops_the_write(tmp_path):
    """The test above is blind if the tiny model fits below the limit."""
    assert hasattr(signal, "SIGXFSZ")
    assert hasattr(resource, "RLIMIT_FSIZE")
    with atomic_folder(tmp_path / "x") as folder:
        torch.save(torch.zeros(50_000), folder / "state.pt")
    files = json.loads((tmp_path / "x" / MANIFEST).read_text())["files"]
    assert files["state.pt"]["bytes"] > 100_000
