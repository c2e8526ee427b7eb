"""`openzaya chat`: talk to a checkpoint in the terminal."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from openzaya.cli.generate import CHECKPOINT_HELP, add_sampling_arguments, open_from, settings_from
from openzaya.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from openzaya.serve.session import ChatSession

HELP = "talk to a checkpoint, turn by turn"

_COMMANDS = """\
/help           this list
/reset          forget the conversation
/seed N         draw the next answers with this seed
/think on|off   open every answer with reasoning, shown dim, or do not
/quit           leave; so does Ctrl-D

Ctrl-C stops a running answer."""

_EPILOG = f"""\
examples:
  openzaya chat runs/first
  openzaya chat runs/first --think --temperature 0.6 --system 'Answer in one line.'
  printf 'What is 2+2?\\nAnd twice that?\\n' | openzaya chat runs/first --seed 1

commands inside:
{_COMMANDS}

The conversation's state is kept: a turn costs its own tokens, however long the talk before it.
"""

_PROMPT = "> "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG.replace("%", "%%")
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT_HELP)
    add_sampling_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="a first message that sets the tone")
    parser.add_argument("--think", action="store_true", help="start with reasoning switched on")


def run(args: argparse.Namespace) -> int:
    """Run the verb."""
    settings = settings_from(args)

    from rich.console import Console

    from openzaya.checkpoint.run import find_checkpoint
    from openzaya.serve.loading import open_chat_format
    from openzaya.serve.session import ChatSession

    folder = find_checkpoint(args.checkpoint)
    model, tokenizer = open_from(args, folder)
    form = open_chat_format(folder, tokenizer)
    session = ChatSession(model, tokenizer, form, settings, args.system, args.think)
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    terminal = sys.stdin.isatty()
    if terminal:
        import readline  # noqa: F401 (importing it gives input() editing and history)

        console.print(f"{folder}   /help lists commands", style="dim")
    while (line := _read(terminal)) is not None:
        line = line.strip()
        try:
            if line.startswith("/"):
                if not _obey(line, session, console):
                    return 0
            elif line:
                _answer(line, session, console, terminal)
        except UserError as error:
            # Some turn that cannot be: the conversation before it is still good.
            console.print(f"error: {error}")
    return 0


def _read(terminal: bool) -> str | None:
    """The next line; None at the end of input."""
    if not terminal:
        return sys.stdin.readline() or None
    while True:
        try:
            return input(_PROMPT)
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:  # clears the line, as shells do
            print()


def _obey(line: str, session: ChatSession, console: Console) -> bool:
    """Carry out a command; False when it says to leave."""
    command, *rest = line.split()
    match [command, *rest]:
        case ["/quit"]:
            return False
        case ["/help"]:
            console.print(_COMMANDS)
        case ["/reset"]:
            session.reset()
            console.print("the conversation is forgotten", style="dim")
        case ["/seed", number] if number.isdecimal():
            session.settings = replace(session.settings, seed=int(number))
            console.print(f"seed {int(number)}", style="dim")
        case ["/think", "on" | "off" as choice]:
            session.thinking = choice == "on"
            console.print(f"reasoning {choice}", style="dim")
        case _:
            raise UserError(f"{line!r} is no command; /help lists them")
    return True


def _answer(text: str, session: ChatSession, console: Console, terminal: bool) -> None:
    """Stream one answer; Ctrl-C ends it and keeps what has come."""
    from rich.segment import Segment, Segments
    from rich.style import Style

    dim = Style(dim=True)
    pieces = session.ask(text)
    kind = None
    try:
        for piece in pieces:
            if kind == "reasoning" and piece.kind == "answer":
                console.print()  # the answer begins on its own line
            kind = piece.kind
            style = dim if kind == "reasoning" else None
            # As a segment: rich would turn the tabs of a string into spaces.
            console.print(Segments([Segment(piece.text, style)]), end="")
    except KeyboardInterrupt:
        console.print(" [stopped]", end="", style="dim")
    finally:
        pieces.close()
    console.print()
    if session.last is not None and session.last.finish_reason == "length":
        console.print("[cut at the limit of tokens]", style="dim")
    if terminal and session.last is not None:
        rate = session.last.decode_rate
        console.print(f"[{len(session.last.ids)} tokens at {rate:.0f}/s]", style="dim")
