"""Files that are cut off, garbled, left over or gone: refused by load and by conversion alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from openzaya.checkpoint.compare import check_data, open_for_reading
from openzaya.checkpoint.manifest import MANIFEST
from openzaya.checkpoint.run import find_checkpoint
from openzaya.checkpoint.weights import CONFIG, INDEX, WEIGHTS
from openzaya.errors import UserError
from tests.checkpoint.checkpoints import (
    check_refused,
    edit_config,
    edit_index,
    every_dialect,
    every_layout,
    logits,
    make,
    make_sharded,
    read_raw,
    read_tensors,
    rewrite,
    shards,
    stored_name,
    write_raw,
)

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.layers.1.input_layernorm.weight"


def _flip(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


# One file


@every_layout
@pytest.mark.parametrize(
    "cut",
    [
        lambda size, start: 0,
        lambda size, start: 8,
        lambda size, start: start // 2,
        lambda size, start: start,
        lambda size, start: (size + start) // 2,
        lambda size, start: size - 4,
        lambda size, start: size - 1,
    ],
)
@pytest.mark.parametrize("sharded", [False, True])
def test_a_file_that_is_cut_off(cut, sharded, dialect, tmp_path):
    folder = (make_sharded if sharded else make)(tmp_path / "source", dialect)
    file = shards(folder)[-1]
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    file.write_bytes(content[: cut(len(content), start)])
    check_refused(folder, dialect, file.name, "damaged")


@every_layout
@pytest.mark.parametrize("extra", [1, 4096])
def test_a_file_with_bytes_at_its_end(extra, dialect, tmp_path):
    folder = make(tmp_path / "source", dialect)
    with (folder / WEIGHTS).open("ab") as file:
        file.write(bytes(extra))
    check_refused(folder, dialect, WEIGHTS, "too long")


@pytest.mark.parametrize("length", [0, 1, 8, 1 << 20, 1 << 40, (1 << 64) - 1])
def test_a_header_of_a_wrong_length(length, tmp_path):
    folder = make(tmp_path / "source", "B")
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(length.to_bytes(8, "little") + content[8:])
    check_refused(folder, "B", WEIGHTS, "damaged")


@pytest.mark.parametrize("move", [-8, -1, 1, 8])
def test_a_header_whose_length_is_a_little_off(move, tmp_path):
    folder = make(tmp_path / "source", "C")
    content = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(content[:8], "little") + move
    (folder / WEIGHTS).write_bytes(length.to_bytes(8, "little") + content[8:])
    check_refused(folder, "C", WEIGHTS, "damaged")


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"3", b"\xff\xfe", b"[" * 100_000, b'{"a": 1}'])
def test_a_header_that_is_no_table(text, tmp_path):
    folder = make(tmp_path / "source", "C")
    write_raw(folder / WEIGHTS, text, b"")
    check_refused(folder, "C", WEIGHTS, "damaged")


def _overlap(header: dict[str, Any], name: str) -> None:
    begin, end = header[name]["data_offsets"]
    header[name]["data_offsets"] = [begin - 4, end - 4]


def _gap(header: dict[str, Any], name: str) -> None:
    first = header[name]["data_offsets"][0]
    for fields in (fields for key, fields in header.items() if key != "__metadata__"):
        begin, end = fields["data_offsets"]
        if begin >= first:
            fields["data_offsets"] = [begin + 8, end + 8]


def _set(**changes: Any) -> Callable[[dict[str, Any], str], None]:
    return lambda header, name: header[name].update(changes)


@every_layout
@pytest.mark.parametrize(
    "change",
    [
        _overlap,
        _gap,
        _set(dtype="BF16"),
        _set(dtype="F64"),
        _set(dtype="F7"),
        _set(dtype=None),
        _set(dtype=["F32"]),
        _set(shape=[-32]),
        _set(shape=[-4, -8]),
        _set(shape=[31]),
        _set(shape=[32.0]),
        _set(shape=["32"]),
        _set(shape=None),
        _set(shape=[True] * 5),
        _set(data_offsets=[0]),
        _set(data_offsets=[128, 0]),
        _set(data_offsets=[-128, 0]),
        _set(data_offsets=None),
        _set(data_offsets=["0", "128"]),
        lambda header, name: header[name].pop("dtype"),
        lambda header, name: header.update({name: 3}),
    ],
)
def test_a_header_whose_entry_is_wrong(change, dialect, tmp_path):
    """The message names the tensor, or the one that comes to stand beside the hole."""
    folder = make(tmp_path / "source", dialect)
    header, data = read_raw(folder / WEIGHTS)
    name = stored_name(NORM, dialect)
    change(header, name)
    if change is _gap:
        data += bytes(8)
    write_raw(folder / WEIGHTS, header, data)
    check_refused(folder, dialect, WEIGHTS, name)


@every_dialect
def test_a_header_with_a_tensor_twice(dialect, tmp_path):
    folder = make(tmp_path / "source", dialect)
    header, data = read_raw(folder / WEIGHTS)
    name = stored_name(NORM, dialect)
    text = json.dumps(header)[:-1] + f', "{name}": {json.dumps(header[name])}}}'
    write_raw(folder / WEIGHTS, text.encode(), data)
    check_refused(folder, dialect, WEIGHTS, f"{name} is in it twice")


# Several files and their index


@every_dialect
@pytest.mark.parametrize("number", [0, 1, -1])
def test_a_shard_is_missing(number, dialect, tmp_path):
    folder = make_sharded(tmp_path / "source", dialect)
    gone = shards(folder)[number]
    gone.unlink()
    check_refused(folder, dialect, f"{gone.name} is missing")


@pytest.mark.parametrize("file", ["../x.safetensors", "/x.safetensors", "a/b.safetensors", 3, None])
def test_an_index_that_names_no_file_of_the_folder(file, tmp_path):
    """Although the file is there, and holds what it should."""
    folder = make_sharded(tmp_path / "source", "B")
    if isinstance(file, str) and file.startswith(".."):
        (tmp_path / "x.safetensors").write_bytes(shards(folder)[0].read_bytes())
    edit_index(folder, lambda table: table.update({EMBEDDING: file}))
    check_refused(folder, "B", INDEX, EMBEDDING)


@pytest.mark.parametrize(
    "file",
    [
        "..",
        "",
        CONFIG,
        INDEX,
        "no.safetensors",
        pytest.param("a" * 300, id="long"),
    ],
)
def test_an_index_that_names_no_weights(file, tmp_path):
    folder = make_sharded(tmp_path / "source", "C")
    edit_index(folder, lambda table: table.update({EMBEDDING: file}))
    check_refused(folder, "C", file)


@every_dialect
def test_an_index_that_names_the_wrong_shard(dialect, tmp_path):
    folder = make_sharded(tmp_path / "source", dialect)
    other = shards(folder)[-1].name
    edit_index(folder, lambda table: table.update({EMBEDDING: other}))
    check_refused(folder, dialect, f"holds {EMBEDDING}, which {INDEX} says is in {other}")


@every_dialect
def test_an_index_that_lists_what_no_file_holds(dialect, tmp_path):
    folder = make_sharded(tmp_path / "source", dialect)
    file = shards(folder)[0].name
    edit_index(folder, lambda table: table.update(extra=file))
    check_refused(folder, dialect, INDEX, f"{file} holds extra; it does not")


@every_dialect
def test_an_index_that_omits_a_tensor(dialect, tmp_path):
    folder = make_sharded(tmp_path / "source", dialect)
    name = stored_name(NORM, dialect)
    edit_index(folder, lambda table: table.pop(name))
    check_refused(folder, dialect, name, f"{INDEX} does not list")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": 3}',
        '{"weight_map": null}',
        b"\xff\xfe",
        pytest.param('{"weight_map": ' + "[" * 100_000, id="deep"),
    ],
)
def test_an_index_that_is_none(text, tmp_path):
    folder = make_sharded(tmp_path / "source", "A")
    (folder / INDEX).write_bytes(text if isinstance(text, bytes) else text.encode())
    check_refused(folder, "A", INDEX)


def test_an_index_without_entries(tmp_path):
    folder = make_sharded(tmp_path / "source", "A")
    edit_index(folder, lambda table: table.clear())
    check_refused(folder, "A", shards(folder)[0].name, INDEX)


@every_dialect
def test_a_tensor_in_two_shards(dialect, tmp_path):
    folder = make_sharded(tmp_path / "source", dialect)
    first, *_, last = shards(folder)
    rewrite(folder, lambda t: t.update({EMBEDDING: torch.zeros(61, 32)}), last.name)
    check_refused(folder, dialect, EMBEDDING, first.name, last.name)


@every_dialect
@pytest.mark.parametrize("name", ["model-00099-of-00099.safetensors", WEIGHTS])
def test_weights_that_the_index_does_not_know(name, dialect, tmp_path):
    """A stray shard, or a whole model beside the shards: nothing says which of them is meant."""
    folder = make_sharded(tmp_path / "source", dialect)
    content = (make(tmp_path / "whole", dialect, seed=1) / WEIGHTS).read_bytes()
    (folder / name).write_bytes(content)
    check_refused(folder, dialect, f"{name} is not in {INDEX}")


def test_weights_with_stray_shards_and_no_index(tmp_path):
    """As a download leaves it whose index is missing, over the weights of an older one."""
    folder = make(tmp_path / "source", "C")
    for file in shards(make_sharded(tmp_path / "newer", "C", seed=1)):
        (folder / file.name).write_bytes(file.read_bytes())
    check_refused(folder, "C", "model-00001-of")


@every_dialect
def test_shards_without_index(dialect, tmp_path):
    folder = make_sharded(tmp_path / "source", dialect)
    (folder / INDEX).unlink()
    check_refused(folder, dialect, shards(folder)[0].name, f"no {INDEX}")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin"])
def test_pickles_alone(name, tmp_path):
    folder = make(tmp_path / "source", "B")
    torch.save(read_tensors(folder), folder / name)
    (folder / WEIGHTS).unlink()
    check_refused(folder, "B", name, "pickles can run code")


@every_layout
@pytest.mark.parametrize("what", [WEIGHTS, CONFIG])
@pytest.mark.parametrize("instead", ["nothing", "a folder", "a dangling link"])
def test_a_file_is_not_there(what, instead, dialect, tmp_path):
    folder = make(tmp_path / "source", dialect)
    (folder / what).unlink()
    if instead == "a folder":
        (folder / what).mkdir()
    elif instead == "a dangling link":
        (folder / what).symlink_to(tmp_path / "gone")
    check_refused(folder, dialect, what)


def test_no_folder(tmp_path):
    check_refused(tmp_path / "absent", "C", CONFIG)


# Manifests


@every_dialect
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("where", ["first", "last"])
def test_one_flipped_bit_is_named_by_its_tensor(where, sharded, dialect, tmp_path):
    folder = (make_sharded if sharded else make)(tmp_path / "source", dialect, manifest=True)
    file = shards(folder)[0]
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    names = [name for name in read_raw(file)[0] if name != "__metadata__"]
    _flip(file, start if where == "first" else len(content) - 4)
    check_refused(folder, dialect, names[0 if where == "first" else -1], "checksum")
    with pytest.raises(UserError, match="checksum"):
        check_data(open_for_reading(folder))


@every_dialect
def test_a_shard_of_another_checkpoint(dialect, tmp_path):
    """Same names, same sizes, other numbers: only the manifest can tell."""
    folder = make_sharded(tmp_path / "source", dialect, manifest=True)
    other = make_sharded(tmp_path / "other", dialect, seed=1)
    file = shards(folder)[3]
    file.write_bytes((other / file.name).read_bytes())
    check_refused(folder, dialect, file.name, "tensor model.", "checksum")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"files": 3}',
        '{"files": {"model.safetensors": []}}',
        '{"files": {"model.safetensors": {"bytes": "x", "sha256": ""}}}',
        '{"files": {"model.safetensors": {"bytes": 1, "sha256": "", "tensors": {"x": "no"}}}}',
        b"\xff\xfe",
        pytest.param("[" * 100_000, id="deep"),
        pytest.param(
            '{"files": {"model.safetensors": {"bytes": 1e999, "sha256": ""}}}', id="endless"
        ),
    ],
)
def test_a_manifest_that_is_none(text, tmp_path):
    folder = make(tmp_path / "source", "C")
    (folder / MANIFEST).write_bytes(text if isinstance(text, bytes) else text.encode())
    check_refused(folder, "C", MANIFEST)


@every_dialect
@pytest.mark.parametrize("what", ["settings", "a file gone", "weights cut off", "more weights"])
def test_what_users_name_is_verified(what, dialect, tmp_path):
    """Settings changed after the manifest was written, and what sizes alone give away."""
    folder = make(tmp_path / "source", dialect, manifest=True)
    assert find_checkpoint(folder) == folder
    name = CONFIG if what == "settings" else WEIGHTS
    if what == "settings":
        edit_config(folder, rope_theta=3.0)
    elif what == "a file gone":
        (folder / WEIGHTS).unlink()
    elif what == "weights cut off":
        (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-4])
    else:
        save_file({**read_tensors(folder), "extra": torch.zeros(3)}, folder / WEIGHTS)
    with pytest.raises(UserError, match=f"damaged.*{name}") as caught:
        find_checkpoint(folder)
    assert str(folder) in str(caught.value)


@every_dialect
def test_nothing_of_this_touches_a_good_checkpoint(dialect, tmp_path):
    """The same makers, unspoiled: one file, several, with and without manifest, as rewritten."""
    expected = logits(make(tmp_path / "plain", dialect))
    assert torch.equal(logits(make(tmp_path / "manifest", dialect, manifest=True)), expected)
    assert torch.equal(logits(make_sharded(tmp_path / "sharded", dialect)), expected)
    rewritten = make(tmp_path / "rewritten", dialect)
    rewrite(rewritten, lambda tensors: None)
    assert torch.equal(logits(rewritten), expected)
    header, data = read_raw(rewritten / WEIGHTS)
    write_raw(rewritten / WEIGHTS, header, data)
    assert torch.equal(logits(rewritten), expected)
