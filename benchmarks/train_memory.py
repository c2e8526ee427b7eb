"""What recomputing activations saves, and what it costs: peak memory and time of a training step.

    python benchmarks/train_memory.py [--width 256] [--width 512] [--rounds 3] [--json]

The small geometry with 12 layers, in bf16, 8 x 512 tokens, with fused AdamW; every mode of
`run.recompute` in processes of its own that take turns. Peak memory is what the process takes
beyond what it would with a tiny model. Weights, gradients and both moments (16 bytes a parameter)
are part of it and stay; `activations` is the rest, and what recomputing can save of. The bar is for
`full`: at most half the activations, at most 35 % more time.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, get_args

from common import GEOMETRIES, Job, alternate, milliseconds, table
from rich.console import Console

from openzaya.model.accounting import count_parameters

MODES: tuple[str, ...] = get_args(Job.model_fields["recompute"].annotation)
LEAST_SAVED, MOST_TIME = 2.0, 1.35


def run(width: int, args: argparse.Namespace) -> dict[str, Any]:
    """All modes at one width."""
    config = GEOMETRIES["small"].model_copy(
        update={
            "num_hidden_layers": args.layers,
            "hidden_size": width,
            "moe_intermediate_size": width,
            "num_attention_heads": width // 32,
            "num_key_value_heads": width // 128,
        }
    )
    job = Job(config=config, batch=args.batch, context=args.context, threads=args.threads)
    jobs = {mode: job.model_copy(update={"recompute": mode}) for mode in MODES}
    results = alternate(jobs, args.rounds, args.steps, args.warmup, together=False)
    parameters = count_parameters(config).total
    held = 16 * parameters / 2**20
    none = results["none"]
    return {
        "width": width,
        "parameters": parameters,
        "held_mib": held,
        "rows": {
            mode: {
                **result.to_json(),
                "time": result.ratio_to(none),
                "peak_saved": none.peak_mib / result.peak_mib,
                "activations_mib": result.peak_mib - held,
                "activations_saved": (none.peak_mib - held) / (result.peak_mib - held),
            }
            for mode, result in results.items()
        },
    }


def passes(result: dict[str, Any]) -> bool:
    """Whether recomputing everything is worth it."""
    full = result["rows"]["full"]
    return bool(full["activations_saved"] >= LEAST_SAVED and full["time"] <= MOST_TIME)


def show(result: dict[str, Any], args: argparse.Namespace, console: Console) -> None:
    """One table and its verdict."""
    lines = [
        (
            mode,
            milliseconds(row["median"]),
            f"{row['time']:.2f}",
            f"{row['peak_mib']:,.0f}",
            f"{row['peak_saved']:.2f}",
            f"{row['activations_mib']:,.0f}",
            f"{row['activations_saved']:.2f}",
        )
        for mode, row in result["rows"].items()
    ]
    title = (
        f"{result['width']} wide, {args.layers} layers, {result['parameters'] / 1e6:.1f}M "
        f"parameters, {args.batch} x {args.context} tokens"
    )
    columns = ("recomputed", "step ms", "time", "peak MiB", "less by", "activations", "less by")
    console.print(table(title, columns, lines))
    verdict = "reached" if passes(result) else "MISSED"
    console.print(
        f"weights, gradients and moments: {result['held_mib']:,.0f} MiB. The bar (full:\n"
        f"{LEAST_SAVED:g}x less of activations, {MOST_TIME:g}x time) is {verdict}.\n"
    )


def main() -> None:
    """Print one table for each width; exit code 1 if one misses the bar."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, action="append", help="256 and 512 by default")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each mode")
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn")
    parser.add_argument("--warmup", type=int, default=2, help="steps of a process not counted")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = []
    for width in args.width or (256, 512):
        results.append(run(width, args))
        if not args.json:
            show(results[-1], args, Console())
    if args.json:
        print(json.dumps(results))
    sys.exit(not all(map(passes, results)))


if __name__ == "__main__":
    main()
