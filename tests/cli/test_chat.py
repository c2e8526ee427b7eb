from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from openzaya.cli import chat
from openzaya.serve.session import ChatSession
from openzaya.serve.text import Piece
from tests.serve.helpers import lively_model, one_thread, write_checkpoint

Talk = Callable[..., str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with one_thread():
        yield write_checkpoint(tmp_path_factory.mktemp("cli") / "model", lively_model())


@pytest.fixture
def talk(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    """What is printed when these lines are piped in."""

    def run(lines: str, *argv: str) -> str:
        parser = argparse.ArgumentParser()
        chat.add_arguments(parser)
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        args = parser.parse_args([str(folder), "--max-tokens", "6", "--seed", "1", *argv])
        assert chat.run(args) == 0
        return capsys.readouterr().out

    return run


def test_one_turn_a_line(talk: Talk) -> None:
    first = talk("The user asks\n")
    both = talk("The user asks\n\nand then\n")
    assert both.startswith(first)
    assert len(both) > len(first)
    assert talk("The user asks\nand then") == both  # no line break at the end


def test_commands(talk: Talk) -> None:
    first = talk("The user asks\n")
    again = talk("The user asks\n/reset\nThe user asks\n")
    assert again == first + "the conversation is forgotten\n" + first
    assert "/think on|off" in talk("/help\n")
    assert talk("/seed 2\nThe user asks\n") == "seed 2\n" + talk("The user asks\n", "--seed", "2")
    assert talk("/quit\nThe user asks\n") == ""
    thinking = talk("The user asks\n", "--think")
    assert talk("/think on\nThe user asks\n") == "reasoning on\n" + thinking
    assert thinking != first


def test_bad_lines_do_not_end_the_talk(talk: Talk) -> None:
    out = talk("/seed x\n/what\n" + "too long " * 300 + "\nThe user asks\n")
    assert out.count("is no command; /help lists them") == 2
    assert "start a new conversation" in out
    assert out.endswith(talk("The user asks\n"))


def test_text_is_shown_as_it_is(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(self: ChatSession, text: str) -> Generator[Piece, None, None]:
        for part in ("[b]", "\tx", " :smile: ", "word " * 40, "\n"):
            yield Piece("answer", part)

    monkeypatch.setattr(ChatSession, "ask", ask)
    assert talk("hi\n") == "[b]\tx :smile: " + "word " * 40 + "\n\n"


def test_ctrl_c_stops_the_answer_only(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = ChatSession.ask
    calls: list[str] = []

    def interrupted(self: ChatSession, text: str) -> Generator[Piece, None, None]:
        calls.append(text)
        pieces = ask(self, text)
        yield next(pieces)
        if len(calls) == 1:
            pieces.close()
            raise KeyboardInterrupt
        yield from pieces

    monkeypatch.setattr(ChatSession, "ask", interrupted)
    out = talk("The user asks\nand then\n")
    assert " [stopped]\n" in out
    assert calls == ["The user asks", "and then"]


def test_a_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Ctrl-C at the prompt clears the line, Ctrl-D leaves."""
    keys: list[Any] = [KeyboardInterrupt(), "The user asks", EOFError()]

    def typed(prompt: str) -> str:
        key = keys.pop(0)
        if isinstance(key, BaseException):
            raise key
        return str(key)

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    parser = argparse.ArgumentParser()
    chat.add_arguments(parser)
    assert chat.run(parser.parse_args([str(folder), "--max-tokens", "6"])) == 0
    out = capsys.readouterr().out
    assert "/help lists commands" in out
    assert "tokens at" in out
    assert keys == []
