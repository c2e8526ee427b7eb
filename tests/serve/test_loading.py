from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from openzaya.checkpoint.run import find_checkpoint
from openzaya.data.chat import CHAT_TEMPLATE
from openzaya.errors import UserError
from openzaya.serve.chat_format import NativeFormat, TemplateFormat, Turn
from openzaya.serve.loading import open_chat_format, open_checkpoint
from tests.serve.helpers import damage, lively_model, tokenizer, write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def run(tmp_path: Path, folder: Path) -> Path:
    for step in (9, 10, 100):
        shutil.copytree(folder, tmp_path / "checkpoints" / f"step-{step:08d}")
    return tmp_path


def test_a_model_folder(folder: Path) -> None:
    model, own = open_checkpoint(folder)
    assert own.vocab_size == tokenizer().vocab_size
    for name, tensor in lively_model().state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    model, _ = open_checkpoint(str(folder), torch.bfloat16)
    assert model.compute_dtype == torch.bfloat16


def test_a_folder_without_manifest_is_taken_as_it_is(tmp_path: Path, folder: Path) -> None:
    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m" / "manifest.json").unlink()
    open_checkpoint(tmp_path / "m")


def test_the_newest_checkpoint_of_a_run(run: Path) -> None:
    said: list[str] = []
    assert find_checkpoint(run, said.append).name == "step-00000100"
    assert said == []


def test_a_damaged_newest_checkpoint_is_skipped_and_named(run: Path) -> None:
    damage(run / "checkpoints" / "step-00000100" / "model.safetensors")
    (run / "checkpoints" / "step-00000010" / "tokenizer.json").unlink()
    said: list[str] = []
    assert find_checkpoint(run, said.append).name == "step-00000009"
    assert "step-00000100" in said[0]
    assert "SHA-256" in said[0]
    assert "tokenizer.json is missing" in said[1]
    assert "step-00000009" in said[2]
    open_checkpoint(run, say=said.append)


def test_only_damaged_checkpoints(run: Path) -> None:
    for file in run.rglob("model.safetensors"):
        damage(file)
    with pytest.raises(UserError, match="every checkpoint of this run is damaged"):
        find_checkpoint(run)


def test_a_damaged_model_folder(run: Path) -> None:
    one = run / "checkpoints" / "step-00000009"
    damage(one / "model.safetensors")
    with pytest.raises(UserError, match=r"is damaged: tensor \S+ does not match"):
        open_checkpoint(one)
    (one / "config.json").unlink()
    with pytest.raises(UserError, match=r"config\.json is missing"):
        open_checkpoint(one)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no folder"):
        open_checkpoint(tmp_path / "none")
    with pytest.raises(UserError, match="holds no model"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("device", ["nonsense", "cuda:99", "meta:x"])
def test_devices_that_are_not_there(folder: Path, device: str) -> None:
    with pytest.raises(UserError, match="cannot be used here"):
        open_checkpoint(folder, device=device)


def test_missing_and_foreign_tokenizer(tmp_path: Path, folder: Path) -> None:
    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m" / "manifest.json").unlink()
    (tmp_path / "m" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        open_checkpoint(tmp_path / "m")
    write_checkpoint(tmp_path / "small", lively_model(vocab_size=300))
    with pytest.raises(UserError, match="do not belong together"):
        open_checkpoint(tmp_path / "small")


def test_chat_formats(tmp_path: Path, folder: Path) -> None:
    assert isinstance(open_chat_format(folder, tokenizer()), NativeFormat)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    assert isinstance(open_chat_format(tmp_path, tokenizer()), NativeFormat)
    shutil.copy(folder / "tokenizer.json", tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 4]}')
    for source in ("{{ eos_token }}x", [{"name": "default", "template": "{{ eos_token }}x"}]):
        tokens = {"eos_token": {"content": "<eos>"}, "chat_template": source}
        file.write_text(json.dumps(tokens))
        own = open_chat_format(tmp_path, tokenizer())
        assert isinstance(own, TemplateFormat)
        assert {1, 4} <= set(own.stop_ids)
        prompt = own.prompt([Turn("user", "hi")], False)
        assert prompt.ids == [tokenizer().eos_id, *tokenizer().encode("x")]
    (tmp_path / "chat_template.jinja").write_text("y")
    assert open_chat_format(tmp_path, tokenizer()).prompt([], False).ids == tokenizer().encode("y")
    file.write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config\.json cannot be read"):
        open_chat_format(tmp_path, tokenizer())
