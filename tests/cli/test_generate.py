from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from openzaya.cli import generate
from openzaya.errors import UserError
from tests.serve.helpers import lively_model, one_thread, write_checkpoint

GREEDY = ("--temperature", "0", "--max-tokens", "8")


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    return parser.parse_args(argv)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with one_thread():
        model = lively_model(eos_token_id=2)
        yield write_checkpoint(tmp_path_factory.mktemp("cli") / "model", model)


def text_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert generate.run(parse(*argv)) == 0
    return capsys.readouterr().out


def test_one_prompt_and_stdin_and_a_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = text_of(capsys, str(folder), "Once upon", *GREEDY)
    assert plain.startswith("Once upon")
    assert len(plain) > len("Once upon\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("Once upon\n"))
    assert text_of(capsys, str(folder), "-", *GREEDY) == plain
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert generate.run(parse(str(folder), "Once upon", *GREEDY)) == 0
    captured = capsys.readouterr()
    assert captured.out == plain
    assert "8 new at" in captured.err


def test_several_prompts_in_order(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = text_of(capsys, str(folder), "The", "Once upon a", *GREEDY)
    first, second = out.split("--- 2 of 2\n")
    assert first.startswith("--- 1 of 2\nThe")
    assert second.startswith("Once upon a")


def test_json_lines_and_seeds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = (str(folder), "The", "The", "--seed", "4", "--max-tokens", "8", "--json")
    lines = [json.loads(line) for line in text_of(capsys, *argv).splitlines()]
    assert [line["prompt"] for line in lines] == ["The", "The"]
    assert lines[0]["ids"] != lines[1]["ids"]
    argv = (str(folder), "The", "--seed", "5", "--max-tokens", "8", "--json")
    assert json.loads(text_of(capsys, *argv))["ids"] == lines[1]["ids"]
    assert lines[0]["finish_reason"] in {"length", "eos"}


def test_stop_and_chat_and_dtype(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    free = json.loads(text_of(capsys, str(folder), "The", *GREEDY, "--json"))["text"]
    stop = ("--stop", free[2], "--stop", "zzz")
    stopped = json.loads(text_of(capsys, str(folder), "The", *GREEDY, *stop, "--json"))
    assert stopped["text"] == free[: free.index(free[2])]
    assert stopped["finish_reason"] == "stop"
    chat = json.loads(text_of(capsys, str(folder), "The", *GREEDY, "--chat", "--json"))
    assert chat["prompt_tokens"] > 5
    assert text_of(capsys, str(folder), "The", *GREEDY, "--dtype", "bfloat16").startswith("The")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["x", "--top-p", "2"], "top_p is 2.0"),
        (["x", "--max-tokens", "0"], "max_new_tokens is 0"),
        (["x", "--max-tokens", "600"], "context is 512"),
        ([""], "prompt 1 is empty"),
        (["-", "-"], "only once"),
    ],
)
def test_bad_input(folder: Path, argv: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        generate.run(parse(str(folder), *argv))


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no folder"):
        generate.run(parse(str(tmp_path / "none"), "x"))


def test_help_needs_no_torch() -> None:
    code = (
        "import argparse, sys; from openzaya.cli import chat, generate\n"
        "for verb in (chat, generate):\n"
        "    parser = argparse.ArgumentParser()\n"
        "    verb.add_arguments(parser)\n"
        "    assert 'examples:' in parser.format_help()\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
