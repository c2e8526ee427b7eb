"""`openzaya generate`: continue text with a checkpoint."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openzaya.errors import UserError

if TYPE_CHECKING:
    from openzaya.data.tokenizer import Tokenizer
    from openzaya.model.model import Zaya
    from openzaya.serve.request import Completion
    from openzaya.serve.sampling import SamplingSettings

CHECKPOINT_HELP = "a model folder, training run or hub id"

HELP = "continue one or more prompts with a checkpoint"

_EPILOG = """\
examples:
  openzaya generate runs/first 'Once upon a time'
  openzaya generate runs/first 'The cat' 'The dog' --temperature 0 --max-tokens 40
  openzaya generate runs/first --chat 'What is 17 + 25?' --seed 1 --json
  echo 'Once upon a time' | openzaya generate runs/first -

CHECKPOINT is a model folder in any dialect, a training run, of which the newest whole checkpoint is
taken, or ORG/NAME@REVISION on the hub.
Row r of several prompts draws with seed + r, so that equal prompts give different samples.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT_HELP)
    parser.add_argument(
        "prompts", metavar="PROMPT", nargs="+", help="text to continue; - reads it from stdin"
    )
    add_sampling_arguments(parser)
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="STR",
        help="end the text before this string (repeatable)",
    )
    parser.add_argument("--chat", action="store_true", help="ask each prompt as a chat turn")
    parser.add_argument("--json", action="store_true", help="print one JSON object per prompt")


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that generate and chat share."""
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0 takes the likeliest token, 1 the model's own distribution (default: 0.8)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=0.95,
        metavar="P",
        help="draw from the fewest tokens that reach this probability (default: 0.95)",
    )
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest (default: all)"
    )
    parser.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="drop tokens below P times the likeliest one's probability (default: 0)",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="repeat a result (default: random)")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="new tokens at most (default: 512, if they fit)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of weights and matrix products; bfloat16 halves the memory (default: float32)",
    )
    parser.add_argument(
        "--device", default="cpu", metavar="NAME", help="as torch names it (default: cpu)"
    )
    parser.add_argument(
        "--adapter",
        type=Path,
        metavar="DIR",
        help="a LoRA adapter (PEFT format) or a run that trained one, kept beside the weights",
    )
    parser.add_argument(
        "--residual",
        choices=("float32", "trained"),
        default="float32",
        help="trained: round the residual stream as ZAYA1-base's training did (default: float32)",
    )


def open_from(args: argparse.Namespace, folder: Path) -> tuple[Zaya, Tokenizer]:
    """Model and tokenizer as the shared options ask for.

    Raises:
        UserError: if they, or the adapter, cannot be opened.
    """
    from openzaya.serve.loading import DTYPES, open_folder

    return open_folder(folder, DTYPES[args.dtype], args.device, args.adapter, args.residual)


def settings_from(args: argparse.Namespace, stop: tuple[str, ...] = ()) -> SamplingSettings:
    """The settings that the shared options ask for.

    Raises:
        UserError: if a value is out of range.
    """
    from openzaya.serve.sampling import SamplingSettings

    return SamplingSettings(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=args.seed,
        max_new_tokens=args.max_tokens,
        stop=stop,
    )


def run(args: argparse.Namespace) -> int:
    """Run the verb."""
    settings = settings_from(args, tuple(args.stop))
    texts = _texts(args.prompts)

    from openzaya.checkpoint.run import find_checkpoint
    from openzaya.serve.generate import generate
    from openzaya.serve.loading import open_chat_format

    folder = find_checkpoint(args.checkpoint)
    model, tokenizer = open_from(args, folder)
    stop_ids, opened = None, ""
    if args.chat:
        from openzaya.serve.chat_format import Turn
        from openzaya.serve.request import stop_token_ids

        form = open_chat_format(folder, tokenizer)
        turns = [form.prompt([Turn("user", text)], thinking=False) for text in texts]
        prompts = [turn.ids for turn in turns]
        stop_ids = (*stop_token_ids(model, tokenizer), *form.stop_ids)
        opened = turns[0].opened
    else:
        prompts = [tokenizer.encode(text) for text in texts]

    if len(texts) == 1 and sys.stdout.isatty() and not args.json:
        sys.stdout.write(opened if args.chat else texts[0])
        [completion] = generate(model, tokenizer, prompts, settings, _show, stop_ids)
        sys.stdout.write("\n")
        print(_speed(completion), file=sys.stderr)
        return 0
    completions = generate(model, tokenizer, prompts, settings, stop_ids=stop_ids)
    for number, (text, completion) in enumerate(zip(texts, completions, strict=True)):
        if args.json:
            print(json.dumps(_fields(text, completion), ensure_ascii=False))
            continue
        if len(texts) > 1:
            print(f"--- {number + 1} of {len(texts)}")
        print((opened if args.chat else text) + completion.text)
    return 0


def _texts(prompts: list[str]) -> list[str]:
    """The prompts, with stdin in place of -."""
    if prompts.count("-") > 1:
        raise UserError("- stands for stdin, which can be read only once: give it once")
    texts = [sys.stdin.read().rstrip("\n") if prompt == "-" else prompt for prompt in prompts]
    for number, text in enumerate(texts):
        if not text:
            raise UserError(
                f"prompt {number + 1} is empty: give at least one character of text to continue"
            )
    return texts


def _show(row: int, text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _speed(completion: Completion) -> str:
    return (
        f"[{completion.prompt_tokens} prompt tokens at {completion.prefill_rate:.0f}/s, "
        f"{len(completion.ids)} new at {completion.decode_rate:.0f}/s, "
        f"ended by {completion.finish_reason}]"
    )


def _fields(prompt: str, completion: Completion) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "text": completion.text,
        "ids": completion.ids,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.prompt_tokens,
        "prefill_tokens_per_second": round(completion.prefill_rate, 1),
        "decode_tokens_per_second": round(completion.decode_rate, 1),
    }
