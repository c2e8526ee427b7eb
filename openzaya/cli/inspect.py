"""`openzaya inspect`: what a model costs, before anyone builds it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from openzaya.cli.units import binary, count, flops
from openzaya.errors import UserError
from openzaya.model.config import PRESETS, ModelConfig

if TYPE_CHECKING:
    from rich.table import Table

    from openzaya.checkpoint.dialects import Description
    from openzaya.checkpoint.tensors import Layout
    from openzaya.model.accounting import Account

HELP = "parameters, FLOPs, state and memory of a preset or a checkpoint"

_EPILOG = f"""\
examples:
  openzaya inspect zaya1-8b                        at its longest context
  openzaya inspect zaya1-74b --context 8192 --batch 16
  openzaya inspect zaya1-8b --moments bfloat16     memory with optimizer state in bf16
  openzaya inspect runs/first --json | jq .parameters.total

presets: {", ".join(PRESETS)}
Nothing is built or loaded: all numbers follow from the shapes.
"""

_WIDTH = 78


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument(
        "model", metavar="PRESET|CHECKPOINT", help="a preset, a model folder, or a training run"
    )
    parser.add_argument(
        "--context", type=int, metavar="N", help="tokens of a sequence (default: the longest)"
    )
    parser.add_argument(
        "--batch", type=int, default=1, metavar="N", help="sequences served at once (default: 1)"
    )
    parser.add_argument(
        "--moments",
        choices=["float32", "bfloat16"],
        default="float32",
        help="what training keeps Muon's momentum and AdamW's moments in (default: float32)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Run the verb."""
    from openzaya.model.accounting import BF16, FP32, account

    described = _describe(args.model)
    config = described if isinstance(described, ModelConfig) else described.model
    for option, value in (("--context", args.context), ("--batch", args.batch)):
        if value is not None and not 1 <= value <= 10**12:
            raise UserError(f"{option} is {value:.3g}; it must be from 1 to 1e12")
    moment_bytes = {"float32": FP32, "bfloat16": BF16}[args.moments]
    counted = account(config, args.context, args.batch, moment_bytes)
    if args.json:
        stored = _stored(described)
        fields = {"config": config.model_dump(mode="json"), **stored, **counted.to_json()}
        print(json.dumps({"model": args.model, **fields}, indent=2))
        return 0

    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{args.model}[/bold]  {_shape(config)}")
    for table in _tables(config, counted, "fp32" if moment_bytes == FP32 else "bf16"):
        console.print(table)
    console.print(_stored_line(described))
    if not config.residual_in_fp32:
        console.print(
            "note: trained with a residual stream in the compute dtype; it is served in fp32 "
            "unless --residual trained asks for the same"
        )
    if counted.context > config.max_position_embeddings:
        console.print(
            f"note: {counted.context:,} tokens are more than the "
            f"{config.max_position_embeddings:,} this model is made for"
        )
    return 0


def _describe(name: str) -> ModelConfig | Description:
    """What a preset's name, a path or a hub id stands for."""
    if name in PRESETS:
        return PRESETS[name]
    from openzaya.checkpoint.hub import CONFIG_ONLY, local_folder

    path = local_folder(name, files=CONFIG_ONLY)
    if not path.is_dir():
        raise UserError(
            f"{name!r} is neither a preset nor a folder. Presets: {', '.join(PRESETS)}; "
            "or give a model folder with a config.json, a training run, or ORG/NAME@REVISION"
        )
    from openzaya.checkpoint.dialects import describe_folder
    from openzaya.checkpoint.run import list_checkpoints
    from openzaya.checkpoint.weights import CONFIG

    if not (path / CONFIG).exists() and (checkpoints := list_checkpoints(path)):
        path = checkpoints[-1][1]
    return describe_folder(path)


def _stored(described: ModelConfig | Description) -> dict[str, Any]:
    """Dialect of a checkpoint, and stored tensors in each layout."""
    from openzaya.checkpoint.tensors import has_layout, tensor_count

    if isinstance(described, ModelConfig):
        config, dialect = described, None
    else:
        config, dialect = described.model, described.dialect
    layouts: tuple[Layout, ...] = ("native", "legacy")
    counts = {kind: tensor_count(config, kind) for kind in layouts if has_layout(config, kind)}
    return {"dialect": dialect, "tensors": counts}


def _stored_line(described: ModelConfig | Description) -> str:
    stored = _stored(described)
    names = {"native": "dialect C", "legacy": "dialects A and B"}
    counts = [f"{count:,} in {names[kind]}" for kind, count in stored["tensors"].items()]
    kind = f"a checkpoint of dialect {stored['dialect']}; " if stored["dialect"] else ""
    return f"{kind}stored tensors: {', '.join(counts)}"


def _shape(config: ModelConfig) -> str:
    """The architecture in one line."""
    return (
        f"{config.num_hidden_layers} layers x {config.hidden_size}, {config.attention}, "
        f"{config.num_attention_heads} query and {config.num_key_value_heads} kv heads, "
        f"{config.num_experts} experts"
    )


def _tables(config: ModelConfig, counted: Account, moments: str) -> Iterable[Table]:
    parameters, state = counted.parameters, counted.state
    p = parameters
    yield _table(
        "parameters",
        ("part", "all", "active per token"),
        [
            ("attention", count(p.attention), count(p.attention)),
            ("convolutions", count(p.convolutions), count(p.convolutions)),
            ("router", count(p.router), count(p.router)),
            ("experts", count(p.experts), count(p.active_experts)),
            ("norms, residual scales", count(p.norms), count(p.norms)),
            (
                "without embeddings",
                count(p.total_without_embeddings),
                count(p.active_without_embeddings),
            ),
            ("embeddings", count(p.embeddings), count(p.embeddings)),
            ("with embeddings", count(p.total), count(p.active)),
        ],
        sums=(5, 7),
    )
    forward, decode = counted.forward, counted.decode
    parts = ("attention", "convolutions", "scores", "router", "experts")
    rows = [(part, flops(getattr(forward, part)), flops(getattr(decode, part))) for part in parts]
    rows += [
        ("without LM head", flops(forward.total_without_head), flops(decode.total_without_head)),
        ("LM head", flops(forward.lm_head), flops(decode.lm_head)),
        ("all", flops(forward.total), flops(decode.total)),
        ("training (x 3)", flops(counted.training_flops), ""),
    ]
    yield _table(
        f"FLOPs per token at {counted.context:,} tokens",
        ("part", "forward, mean", "decode, last token"),
        rows,
        sums=(5, 7, 8),
    )
    sliding = sum(kind == "hybrid_sliding" for kind in config.types)
    capped = f" ({sliding} layers stop at {config.sliding_window:,})" if sliding else ""
    yield _table(
        "state of a sequence (bf16 keys and values)",
        ("what", "bytes", ""),
        [
            ("KV per token", f"{state.kv_per_token:,}", binary(state.kv_per_token)),
            (
                "  multi-head attention",
                f"{state.mha_kv_per_token:,}",
                f"{state.compression:.4g}x as much",
            ),
            (
                "conv tail and lagged value",
                f"{state.fixed_per_sequence:,}",
                binary(state.fixed_per_sequence),
            ),
            (
                f"KV of {counted.context:,} tokens{capped}",
                f"{state.kv_at_context:,}",
                binary(state.kv_at_context),
            ),
        ],
    )
    training, serving = counted.training, counted.serving
    yield _table(
        "memory",
        ("to train (without activations)", "", "to serve", ""),
        [
            ("weights, fp32", binary(training.weights), "weights, bf16", binary(serving.weights)),
            (
                "gradients, fp32",
                binary(training.gradients),
                f"state, batch {counted.batch:,}",
                binary(serving.state),
            ),
            (f"Muon momentum, {moments}", binary(training.muon), "", ""),
            (f"AdamW moments, {moments}", binary(training.adamw), "", ""),
            ("all", binary(training.total), "all", binary(serving.total)),
        ],
        sums=(4,),
    )


def _table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], sums: Sequence[int] = ()
) -> Table:
    """Text columns to the left, number columns to the right; rows in `sums` stand out."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.width = _WIDTH
    texts = (0, 2) if len(columns) == 4 else (0,)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number in texts else "right")
    for number, row in enumerate(rows):
        table.add_row(*row, style="bold" if number in sums else None)
    return table
