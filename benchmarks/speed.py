"""Training step, prefill and decoding: this project beside `transformers`, same weights and shapes.

    python benchmarks/speed.py [--threads 2] [--repeats 5] [--json]

One process, one allocator setting (freed memory is kept), the peer's default `grouped_mm` experts
and SDPA attention. Training is forward, backward and fused AdamW on both sides, in fp32 and in the
mixed precision each of them offers (bf16 products, fp32 weights). Figures are medians; the two
sides take turns, so that a machine whose speed drifts treats them alike. Read the ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from transformers import ZayaConfig, ZayaForCausalLM

from openzaya.checkpoint.dialects import write_config
from openzaya.kernels.allocator import reuse_freed_memory
from openzaya.model.config import PRESETS, ModelConfig
from openzaya.model.init import init_weights
from openzaya.model.model import Zaya

# The geometry that the peers' published figures are given for.
GEOMETRY = PRESETS["small"].model_copy(
    update={
        "vocab_size": 8192,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "max_position_embeddings": 4096,
    }
)


def models(config: ModelConfig) -> tuple[Zaya, ZayaForCausalLM]:
    """Ours and the peer's, with the same weights."""
    ours = Zaya(config)
    init_weights(ours, 0)
    peer = ZayaForCausalLM(ZayaConfig(**write_config(config, "C")))
    peer.load_state_dict(ours.state_dict(), strict=False)
    return ours, peer


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


def training(dtype: torch.dtype, batch: int, seq: int, repeats: int) -> tuple[float, float]:
    """Tokens a second of a training step."""
    ours, peer = models(GEOMETRY)
    ours.compute_dtype = dtype
    tokens = torch.randint(3, GEOMETRY.vocab_size, (batch, seq))
    targets = tokens.roll(-1, 1)
    targets[:, -1] = -100
    adamw = [torch.optim.AdamW(m.parameters(), lr=1e-4, fused=True) for m in (ours, peer)]
    low = dtype == torch.bfloat16

    def step_ours() -> None:
        (ours.loss(ours(tokens).hidden, targets) / tokens.numel()).backward()
        adamw[0].step()
        adamw[0].zero_grad()

    def step_peer() -> None:
        with torch.autocast("cpu", torch.bfloat16) if low else contextlib.nullcontext():
            loss = peer(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        adamw[1].step()
        adamw[1].zero_grad()

    a, b = alternate(step_ours, step_peer, repeats)
    return tokens.numel() / a, tokens.numel() / b


@torch.inference_mode()
def prefill(batch: int, seq: int, repeats: int) -> tuple[float, float]:
    """Tokens a second of a forward without a cache, fp32, logits of all tokens included."""
    ours, peer = models(GEOMETRY)
    tokens = torch.randint(3, GEOMETRY.vocab_size, (batch, seq))
    a, b = alternate(
        lambda: void(ours.logits(ours(tokens).hidden)),
        lambda: void(peer(tokens, use_cache=False)),
        repeats,
    )
    return tokens.numel() / a, tokens.numel() / b


@torch.inference_mode()
def decoding(batch: int, new: int, repeats: int) -> tuple[float, float]:
    """Tokens a second of greedy decoding after a prompt of 64 tokens, fp32."""
    ours, peer = models(GEOMETRY)
    prompt = torch.randint(3, GEOMETRY.vocab_size, (batch, 64))

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
        "train 8 x 512, fp32": training(torch.float32, 8, 512, n),
        "train 8 x 512, bf16": training(torch.bfloat16, 8, 512, n),
        "prefill 8 x 512, fp32": prefill(8, 512, n),
        "decode batch 1, fp32": decoding(1, 64, n),
        "decode batch 8, fp32": decoding(8, 64, n),
    }
    if args.json:
        print(json.dumps({name: {"ours": a, "peer": b} for name, (a, b) in rows.items()}))
        return
    table = Table("tokens a second", "openzaya", "transformers", "ratio")
    for name, (a, b) in rows.items():
        table.add_row(name, f"{a:,.0f}", f"{b:,.0f}", f"{a / b:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
