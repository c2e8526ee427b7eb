"""Prefill and decoding: this project beside `transformers`, same weights and shapes.

    python benchmarks/speed.py [--threads 2] [--repeats 5] [--json]

One process, one allocator setting (freed memory is kept), fp32, the peer's default `grouped_mm`
experts and SDPA attention. Figures are medians; the two sides take turns, so that a machine whose
speed drifts treats them alike. Read the ratio. Training is in `train_vs_transformers.py`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import GEOMETRIES, Job, table
from rich.console import Console
from worker import ours as our_side
from worker import peer as peer_side

from openzaya.kernels.allocator import reuse_freed_memory
from openzaya.model.model import Zaya

JOB = Job(config=GEOMETRIES["small"], dtype="fp32")


def models() -> tuple[Zaya, Any]:
    """Ours and the peer's, with the same weights."""
    return our_side(JOB)[0], peer_side(JOB)[0]


def alternate(
    ours: Callable[[], None], peer: Callable[[], None], repeats: int
) -> tuple[float, float]:
    """Median seconds of both, run in turns, after one run each that is not counted."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 1):
        for side, run in enumerate((ours, peer)):
            started = time.perf_counter()
            run()
            if repeat:
                seconds[side].append(time.perf_counter() - started)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


@torch.inference_mode()
def prefill(batch: int, seq: int, repeats: int) -> tuple[float, float]:
    """Tokens a second of a forward without a cache, fp32, logits of all tokens included."""
    ours, peer = models()
    tokens = torch.randint(3, JOB.config.vocab_size, (batch, seq))
    a, b = alternate(
        lambda: void(ours.logits(ours(tokens).hidden)),
        lambda: void(peer(tokens, use_cache=False)),
        repeats,
    )
    return tokens.numel() / a, tokens.numel() / b


@torch.inference_mode()
def decoding(batch: int, new: int, repeats: int) -> tuple[float, float]:
    """Tokens a second of greedy decoding after a prompt of 64 tokens, fp32."""
    ours, peer = models()
    prompt = torch.randint(3, JOB.config.vocab_size, (batch, 64))

    def run_ours() -> None:
        state = ours.new_state(batch, capacity=64 + new)
        column = prompt
        for _ in range(new):
            hidden = ours(column, state=state).hidden[:, -1:]
            column = ours.logits(hidden).argmax(-1)

    settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    a, b = alternate(run_ours, lambda: void(peer.generate(prompt, **settings)), repeats)
    return batch * new / a, batch * new / b


def void(_: object) -> None:
    """Drop a result."""


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    reuse_freed_memory()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    n = args.repeats
    rows = {
        "prefill 8 x 512": prefill(8, 512, n),
        "decode batch 1": decoding(1, 64, n),
        "decode batch 8": decoding(8, 64, n),
    }
    if args.json:
        print(json.dumps({name: {"ours": a, "peer": b} for name, (a, b) in rows.items()}))
        return
    lines = [(name, f"{a:,.0f}", f"{b:,.0f}", f"{a / b:.2f}") for name, (a, b) in rows.items()]
    columns = ("tokens a second", "openzaya", "transformers", "ratio")
    Console().print(table("", columns, lines))


if __name__ == "__main__":
    main()
