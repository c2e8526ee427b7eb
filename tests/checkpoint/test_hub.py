"""Models by hub id, from a stand-in for the hub on this machine."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants

from openzaya.checkpoint.hub import local_folder
from openzaya.checkpoint.load import load_model
from openzaya.checkpoint.save import save_model
from openzaya.cli.main import main
from openzaya.errors import UserError
from tests.checkpoint.hub_server import HubServer, Repo
from tests.model.helpers import plain_logits, small_model, tokens_for

NAME = "org/tiny"
OLD, NEW = "0123456789abcdef" * 2 + "01234567", "f" * 40
TOKEN = "hf_thisIsTheSecretOfTheTest"
FETCHED = {
    "LICENSE",
    "README.md",
    "chat_template.jinja",
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer.model",
}
NOT_FETCHED = {
    "model_card.pdf",
    "pytorch_model.bin",
    "optimizer.pt",
    "modeling_tiny.py",
    "LICENSE.py",
    "onnx/config.json",
    "original/model.safetensors",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("checkpoint")
    save_model(small_model(), folder)
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    others = (FETCHED | NOT_FETCHED) - files.keys()
    return {**files, **{name: f"content of {name}".encode() for name in others}}


@pytest.fixture
def hub(checkpoint: dict[str, bytes]) -> Iterator[HubServer]:
    newer = {**checkpoint, "LICENSE": b"another"}
    refs = {"v1": OLD, "main": NEW, "refs/pr/1": OLD}
    with HubServer({NAME: Repo({OLD: dict(checkpoint), NEW: newer}, refs)}) as server:
        yield server


@pytest.fixture(autouse=True)
def client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SimpleNamespace]:
    """The library reads the environment once, when it is imported; so set what it made of it."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 1)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(tmp_path / "tokens"))

    def use(url: str) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)

    use("http://127.0.0.1:9")  # where nothing answers
    monkeypatch.chdir(tmp_path)
    yield SimpleNamespace(use=use, cache=tmp_path / "cache")
    huggingface_hub.close_session()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def online(client: SimpleNamespace, hub: HubServer) -> HubServer:
    client.use(hub.url)
    return hub


def _refusal(name: str) -> str:
    with pytest.raises(UserError) as refused:
        local_folder(name, lambda message: None)
    return str(refused.value)


def _names(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


# What is opened


def test_a_commit_is_downloaded_and_opens(online: HubServer, said: list[str]) -> None:
    folder = local_folder(f"{NAME}@{OLD}", said.append)
    model, expected = load_model(folder), small_model()
    tokens = tokens_for(expected, 2, 9)
    torch.testing.assert_close(plain_logits(model, tokens), plain_logits(expected, tokens))
    assert folder.name == OLD
    assert said == []


def test_verbs_take_hub_ids(online: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    """What a model costs is said without fetching its weights; they come when they are needed."""
    assert main(["inspect", f"{NAME}@{OLD}", "--json"]) == 0
    assert online.sent == ["config.json"]
    assert main(["verify", f"{NAME}@{OLD}", "--json"]) == 0
    assert "model.safetensors" in online.sent
    assert main(["inspect", NAME]) == 2
    assert f"{NAME}@{NEW}" in capsys.readouterr().err


def test_only_what_a_checkpoint_needs_is_fetched(online: HubServer) -> None:
    folder = local_folder(f"{NAME}@{OLD}")
    assert _names(folder) == FETCHED
    assert sorted(online.sent) == sorted(FETCHED)
    asked = " ".join(online.requests)
    assert not [name for name in NOT_FETCHED if f"/{name}" in asked]


@pytest.mark.parametrize(
    ("revision", "commit"), [("v1", OLD), ("main", NEW), ("refs/pr/1", OLD), (NEW.upper(), NEW)]
)
def test_of_other_revisions_the_commit_is_said(
    online: HubServer, said: list[str], revision: str, commit: str
) -> None:
    folder = local_folder(f"{NAME}@{revision}", said.append)
    expected = online.repos[NAME].commits[commit]["LICENSE"]
    assert (folder / "LICENSE").read_bytes() == expected
    if revision == NEW.upper():
        assert said == []
    else:
        assert len(said) == 1
        assert f"{NAME}@{commit}" in said[0]


def test_a_branch_that_moves_is_opened_where_it_is_now(online: HubServer, said: list[str]) -> None:
    local_folder(f"{NAME}@main", said.append)
    online.repos[NAME].refs["main"] = OLD
    assert local_folder(f"{NAME}@main", said.append).name == OLD
    assert NEW in said[0]
    assert OLD in said[1]


def test_notices_go_to_stderr(online: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    local_folder(f"{NAME}@v1")
    captured = capsys.readouterr()
    assert OLD in captured.err
    assert captured.out == ""


# The cache


def test_a_commit_in_the_cache_needs_no_hub(online: HubServer, said: list[str]) -> None:
    first = local_folder(f"{NAME}@{OLD}", said.append)
    count = len(online.requests)
    assert local_folder(f"{NAME}@{OLD}", said.append) == first
    assert len(online.requests) == count
    online.stop()
    assert local_folder(f"{NAME}@{OLD}", said.append) == first
    assert said == []


@pytest.mark.parametrize("how", ["stopped", "offline", "503"])
def test_a_tag_in_the_cache_stands_in_for_the_hub(
    online: HubServer, said: list[str], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    first = local_folder(f"{NAME}@v1")
    if how == "stopped":
        online.stop()
    online.status = 503 if how == "503" else None
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", how == "offline")
    assert local_folder(f"{NAME}@v1", said.append) == first
    assert "cannot be reached" in said[0]
    assert f"{NAME}@{OLD}" in said[0]


def test_what_another_program_left_incomplete_is_completed(online: HubServer) -> None:
    huggingface_hub.hf_hub_download(NAME, "config.json", revision=OLD)
    assert _names(local_folder(f"{NAME}@{OLD}")) == FETCHED
    assert online.sent.count("config.json") == 1


# Names


@pytest.mark.parametrize("name", [NAME, f"{NAME}@{OLD}"])
def test_what_exists_locally_wins(online: HubServer, tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir(parents=True)
    assert local_folder(name) == Path(name)
    assert local_folder(tmp_path / name) == tmp_path / name
    assert online.requests == []


def test_a_file_is_returned_too(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    assert local_folder("model.gguf") == Path("model.gguf")


@pytest.mark.parametrize(
    "name",
    [
        "/models/tiny",
        "runs/demo/checkpoints",
        "runs/demo@2/checkpoints",
        "./org/tiny",
        "../tiny",
        ".hidden/tiny",
        "~/tiny",
        "org/tiny/",
        "my org/tiny",
        "org/tiny@v 1",
        "tiny",
        "tiny@v1",
        "org/..",
        "org/tiny--x@v1",
        "org/tiny.git@v1",
        "org/tiny@refs/../../x",
        "org/tiny@@v1",
        f"org/{'x' * 100}@v1",
        f"org/{'x' * 300}",
        "",
    ],
)
def test_what_is_no_hub_id_is_left_to_the_caller(online: HubServer, name: str) -> None:
    assert local_folder(name) == Path(name)
    assert online.requests == []


# Refusals


@pytest.mark.parametrize("name", [NAME, f"{NAME}@"])
def test_a_revision_is_asked_for_and_the_current_one_named(online: HubServer, name: str) -> None:
    message = _refusal(name)
    assert f"{NAME}@REVISION" in message
    assert "branches move" in message
    assert f"{NAME}@{NEW}" in message
    assert online.sent == []


def test_a_revision_is_asked_for_without_a_hub_too() -> None:
    message = _refusal(NAME)
    assert f"{NAME}@REVISION" in message
    assert "current commit" not in message


def test_a_mistyped_path_stays_on_this_machine(online: HubServer, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    assert "no file or folder runs/dmeo" in _refusal("runs/dmeo")
    assert online.requests == []


def test_an_unknown_repository(online: HubServer) -> None:
    for name in (f"org/other@{OLD}", "org/other@v1", "org/other"):
        message = _refusal(name)
        assert "no model org/other" in message
        assert online.url in message
        assert "spelling" in message


def test_an_unknown_revision(online: HubServer) -> None:
    for revision in ("v2", "0" * 40):
        message = _refusal(f"{NAME}@{revision}")
        assert f"{NAME} has no revision {revision}" in message
        assert NEW in message


def test_a_gated_repository(online: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    online.repos[NAME].gated, online.repos[NAME].token = True, TOKEN
    message = _refusal(f"{NAME}@{OLD}")
    assert "gated" in message
    assert f"{online.url}/{NAME}" in message
    assert "hf auth login" in message
    assert "HF_TOKEN" in message
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert _names(local_folder(f"{NAME}@{OLD}")) == FETCHED


def test_a_private_repository(online: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    online.repos[NAME].token = TOKEN
    message = _refusal(f"{NAME}@{OLD}")
    assert "private" in message
    assert "hf auth login" in message
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert _names(local_folder(f"{NAME}@{OLD}")) == FETCHED


@pytest.mark.parametrize("status", [401, 403])
def test_refused_access(online: HubServer, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    online.status = status
    message = _refusal(f"{NAME}@{OLD}")
    assert "hf auth login" in message
    assert online.tokens == {TOKEN}
    assert TOKEN not in message


@pytest.mark.parametrize("tail", ["\x0cx", "é"])
def test_a_token_that_cannot_be_sent_is_not_shown(
    online: HubServer, monkeypatch: pytest.MonkeyPatch, tail: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN + tail)
    with pytest.raises(UserError, match="HF_TOKEN") as refused:
        local_folder(f"{NAME}@{OLD}")
    assert TOKEN not in str(refused.value)
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__  # the client's own error quotes the token


@pytest.mark.parametrize("revision", [OLD, "v1"])
def test_a_hub_that_cannot_be_reached(client: SimpleNamespace, revision: str) -> None:
    client.use("http://user:password@127.0.0.1:9")
    message = _refusal(f"{NAME}@{revision}")
    assert "http://127.0.0.1:9 cannot be reached (Connection refused)" in message
    assert str(client.cache) in message
    assert "password" not in message


def test_a_hub_that_does_not_answer(online: HubServer) -> None:
    online.hang = True
    begin = time.monotonic()
    message = _refusal(f"{NAME}@{OLD}")
    assert time.monotonic() - begin < 8  # the time-out is 1 s here
    assert "cannot be reached" in message
    assert "no answer in time" in message


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_hub_in_trouble(online: HubServer, status: int) -> None:
    online.status = status
    assert f"cannot be reached (it answered {status})" in _refusal(f"{NAME}@{OLD}")


@pytest.mark.parametrize("body", [b"<html>log in to this network</html>", b"{}", b"[]"])
def test_what_is_no_hub(online: HubServer, body: bytes) -> None:
    online.body = body
    assert f"what answers at {online.url} is no hub" in _refusal(f"{NAME}@{OLD}")


def test_offline_by_choice(
    online: HubServer, client: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    message = _refusal(f"{NAME}@{OLD}")
    assert "HF_HUB_OFFLINE" in message
    assert str(client.cache) in message
    assert f"{NAME}@REVISION" in _refusal(NAME)
    assert online.requests == []


def test_a_repository_without_safetensors(online: HubServer) -> None:
    del online.repos[NAME].commits[OLD]["model.safetensors"]
    assert "no *.safetensors" in _refusal(f"{NAME}@{OLD}")
    assert online.sent == []


def test_a_disk_with_too_little_room_is_noticed_before(
    online: HubServer, client: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    message = _refusal(f"{NAME}@{OLD}")
    assert "GB more" in message
    assert str(client.cache) in message
    assert online.sent == []


def test_what_the_cache_holds_needs_no_room(
    online: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_folder(f"{NAME}@{OLD}")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    assert local_folder(f"{NAME}@{NEW}").name == NEW  # only the licence differs, by 7 bytes


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "x"), "no room"),
        (RuntimeError("Data processing error: No space left on device (os error 28)"), "no room"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "Permission denied: /x"),
        (RuntimeError("Data processing error"), "interrupted (RuntimeError)"),
        (ConnectionResetError(errno.ECONNRESET, "reset by peer"), "interrupted (reset by peer)"),
        (OSError("Consistency check failed"), "interrupted (OSError)"),
    ],
)
def test_what_stops_a_download(
    online: HubServer,
    client: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    words: str,
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("huggingface_hub.file_download.http_get", fail)
    message = _refusal(f"{NAME}@{OLD}")
    assert words in message
    if "denied" not in words:
        assert "same command again" in message


def test_ctrl_c_is_passed_on(
    online: HubServer, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("huggingface_hub._snapshot_download.hf_thread_map", interrupt)
    with pytest.raises(KeyboardInterrupt):
        local_folder(f"{NAME}@{OLD}", said.append)
    assert "same command continues" in said[0]


# Downloads that break off


def test_a_cut_download_goes_on_where_it_was(
    online: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1024)  # what is kept at a cut
    online.cut = {"model.safetensors": "close"}
    half = len(online.repos[NAME].commits[OLD]["model.safetensors"]) // 2
    folder = local_folder(f"{NAME}@{OLD}")
    assert online.ranges == [f"model.safetensors from {half - half % 1024}"]
    load_model(folder)


def test_an_interrupted_download_is_continued_by_the_same_command(online: HubServer) -> None:
    online.cut = {"model.safetensors": "reset"}
    message = _refusal(f"{NAME}@{OLD}")
    assert "interrupted" in message
    assert "same command again" in message
    whole = set(online.sent)
    online.sent.clear()
    folder = local_folder(f"{NAME}@{OLD}")
    assert whole
    assert "model.safetensors" in online.sent
    assert not whole & set(online.sent)
    assert _names(folder) == FETCHED
    load_model(folder)


def test_an_interrupted_download_is_not_taken_from_the_cache(online: HubServer) -> None:
    online.cut = {"model.safetensors": "reset"}
    _refusal(f"{NAME}@{OLD}")
    online.stop()
    assert "cannot be reached" in _refusal(f"{NAME}@{OLD}")


# As users start it


_SCRIPT = """
import sys
from openzaya.checkpoint.hub import local_folder
from openzaya.cli.main import main
from openzaya.errors import UserError
assert "huggingface_hub" not in sys.modules
try:
    print(local_folder(sys.argv[1]))
except UserError as error:
    sys.exit(str(error))
"""


def test_the_environment_is_respected(hub: HubServer, tmp_path: Path) -> None:
    hub.repos[NAME].token = TOKEN
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_TOKEN": TOKEN,
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }

    def start(**more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", _SCRIPT, f"{NAME}@{OLD}"],
            env={**environment, **more},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    done = start()
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert folder.is_relative_to(tmp_path / "home" / "hub")
    assert _names(folder) == FETCHED
    elsewhere = start(HF_HUB_CACHE=str(tmp_path / "other"), HF_HUB_OFFLINE="1")
    assert elsewhere.returncode == 1
    assert str(tmp_path / "other") in elsewhere.stderr
    assert TOKEN not in done.stdout + done.stderr + elsewhere.stderr
