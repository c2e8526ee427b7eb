"""A whole training step beside `transformers`: same weights, data, threads and allocator.

    python benchmarks/train_vs_transformers.py [--geometry small|mid] [--compiled] [--json]

Both sides run forward, loss, backward and fused AdamW in a process of their own, so that peak
memory is theirs. The peer runs in all its settings: experts eager or grouped, fp32 or bf16
autocast, and with --compiled also under `torch.compile` (minutes more). We are measured before and
after each of them, since a machine's speed drifts; its ratio is to those two. Figures are medians.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from openzaya.kernels.allocator import reuse_freed_memory
from openzaya.model.accounting import count_parameters, forward_flops
from openzaya.model.config import PRESETS, ModelConfig
from openzaya.model.init import init_weights
from openzaya.model.model import Zaya

GEOMETRIES = {
    # 12.8M parameters, 4.6M of them active.
    "small": PRESETS["small"].model_copy(
        update={
            "vocab_size": 8192,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "max_position_embeddings": 4096,
        }
    ),
    # 361M parameters, 41M of them active.
    "mid": PRESETS["small"].model_copy(
        update={
            "vocab_size": 8192,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 6,
            "head_dim": 64,
            "num_experts": 16,
            "moe_intermediate_size": 768,
            "router_hidden_size": 256,
            "max_position_embeddings": 4096,
        }
    ),
}
ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**26),
}
"""For both sides alike: freed memory stays in the process."""

Setting = dict[str, Any]


def settings(compiled: bool) -> dict[str, Setting]:
    """Our settings, then the peer's."""
    rows: dict[str, Setting] = {
        "openzaya": {"side": "ours"},
        "openzaya, recompute": {"side": "ours", "recompute": "full"},
    }
    for compile_ in (False, True) if compiled else (False,):
        for experts in ("grouped_mm", "eager"):
            for dtype in ("fp32", "bf16"):
                name = f"{experts}, {dtype}" + (", compiled" if compile_ else "")
                rows[name] = {
                    "side": "peer",
                    "experts": experts,
                    "dtype": dtype,
                    "compile": compile_,
                }
    return rows


def batch_of(config: ModelConfig, batch: int, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and next-token targets."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, config.vocab_size, (batch, seq), generator=generator)
    targets = tokens.roll(-1, 1)
    targets[:, -1] = -100
    return tokens, targets


def our_loss(
    config: ModelConfig, weights: Path, setting: Setting
) -> tuple[torch.nn.Module, Callable[..., Any]]:
    """Our model, and its mean loss of a batch."""
    model = Zaya(config, torch.bfloat16)
    model.load_state_dict(load_file(weights))
    model.recompute = setting.get("recompute", "none")

    def loss(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return model.loss(model(tokens).hidden, targets) / (targets >= 0).sum()

    return model, loss


def peer_loss(
    config: ModelConfig, weights: Path, setting: Setting
) -> tuple[torch.nn.Module, Callable[..., Any]]:
    """The peer's model, and its mean loss of a batch."""
    from transformers import ZayaConfig, ZayaForCausalLM

    from openzaya.checkpoint.dialects import write_config

    theirs = ZayaConfig(**write_config(config, "C"))
    theirs._experts_implementation = setting["experts"]
    model = ZayaForCausalLM(theirs)
    loaded = model.load_state_dict(load_file(weights), strict=False)
    assert not loaded.unexpected_keys, loaded
    assert set(loaded.missing_keys) <= {"lm_head.weight"}, loaded  # tied
    assert model.config._experts_implementation == setting["experts"]
    run = torch.compile(model) if setting["compile"] else model
    low = setting["dtype"] == "bf16"

    def loss(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16) if low else contextlib.nullcontext():
            result: torch.Tensor = run(tokens, labels=tokens, use_cache=False).loss
        return result

    return model, loss


def work(job: dict[str, Any]) -> dict[str, Any]:
    """What a process of its own measures: seconds by part of each step, memory, first loss."""
    reuse_freed_memory()
    torch.set_num_threads(job["threads"])
    config, setting = GEOMETRIES[job["geometry"]], job["setting"]
    build = our_loss if setting["side"] == "ours" else peer_loss
    model, loss_of = build(config, Path(job["weights"]), setting)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens, targets = batch_of(config, job["batch"], job["seq"])
    rows, first = [], None
    for step in range(job["warmup"] + job["steps"]):
        marks = [time.perf_counter()]
        loss = loss_of(tokens, targets)
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        optimizer.step()
        optimizer.zero_grad()
        marks.append(time.perf_counter())
        first = float(loss) if first is None else first
        if step >= job["warmup"]:
            rows.append([b - a for a, b in pairwise(marks)])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"steps": rows, "peak_mib": peak, "loss": first}


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """`work` in a new process."""
    done = subprocess.run(
        [sys.executable, __file__, "--work", json.dumps(job)],
        env={**os.environ, **ALLOCATOR, "OMP_NUM_THREADS": str(job["threads"])},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{job['setting']} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    result["seconds"] = statistics.median(sum(step) for step in result["steps"])
    return result


def matrix_peak(dtype: torch.dtype, size: int = 2048) -> float:
    """FLOP/s of a large product, the best of several."""
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(12):
        started = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def compare(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure all settings of one geometry."""
    config = GEOMETRIES[args.geometry]
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.safetensors"
        model = Zaya(config)
        init_weights(model, 0)
        save_file(model.state_dict(), weights)
        del model
        job = {
            "geometry": args.geometry,
            "weights": str(weights),
            "threads": args.threads,
            "batch": args.batch,
            "seq": args.seq,
            "warmup": 2,
            "steps": args.steps,
        }
        rows: dict[str, dict[str, Any]] = {}
        rounds: list[dict[str, Any]] = []
        for name, setting in settings(args.compiled).items():
            console.print(f"measuring {name}", style="dim")
            result = measure({**job, "setting": setting})
            rows[name] = result
            if setting["side"] == "ours":
                ours = result
                continue
            after = measure({**job, "setting": {"side": "ours"}})
            rounds.append(after)
            near = [rows["openzaya"] if len(rounds) == 1 else rounds[-2], after]
            result["ratio"] = result["seconds"] / statistics.mean(r["seconds"] for r in near)
            ours = rows["openzaya"]
            assert abs(result["loss"] - ours["loss"]) < 0.02 * abs(ours["loss"]), (result, ours)
    best = min(
        (row for row in rows.values() if "ratio" in row), key=lambda row: float(row["seconds"])
    )
    everything = [rows["openzaya"], *rounds]
    rows["openzaya"]["steps"] = [step for r in everything for step in r["steps"]]
    rows["openzaya"]["seconds"] = statistics.median(r["seconds"] for r in everything)
    parameters = count_parameters(config)
    flops = 3 * forward_flops(config, args.seq).total * args.batch * args.seq
    return {
        "geometry": args.geometry,
        "parameters": parameters.total,
        "active": parameters.active,
        "tokens": args.batch * args.seq,
        "step_flops": flops,
        "peak_flops": {
            "bf16": matrix_peak(torch.bfloat16),
            "fp32": matrix_peak(torch.float32),
        },
        "rows": rows,
        "ratio_to_best": best["ratio"],
    }


def show(result: dict[str, Any], console: Console) -> None:
    """The table of one geometry, and where our time goes."""
    tokens = result["tokens"]
    console.print(
        f"{result['geometry']}: {result['parameters'] / 1e6:.1f}M parameters, "
        f"{result['active'] / 1e6:.1f}M active, {tokens} tokens a step, with fused AdamW"
    )
    table = Table("setting", "tokens/s", "step ms", "peak MiB", "we are faster by")
    for name, row in result["rows"].items():
        table.add_row(
            name,
            f"{tokens / row['seconds']:,.0f}",
            f"{1e3 * row['seconds']:,.0f}",
            f"{row['peak_mib']:,.0f}",
            f"{row['ratio']:.2f}x" if "ratio" in row else "",
        )
    console.print(table)
    ours = result["rows"]["openzaya"]
    parts = [statistics.median(column) for column in zip(*ours["steps"], strict=True)]
    for name, seconds in zip(("forward and loss", "backward", "optimizer"), parts, strict=True):
        console.print(f"  {name}: {1e3 * seconds:.0f} ms")
    rate = result["step_flops"] / ours["seconds"]
    peak = result["peak_flops"]
    console.print(
        f"  {rate / 1e9:,.0f} GFLOP/s in products, {rate / peak['bf16']:.0%} of a large bf16 "
        f"product's {peak['bf16'] / 1e9:,.0f}, {rate / peak['fp32']:.0%} of fp32's "
        f"{peak['fp32'] / 1e9:,.0f}"
    )
    console.print(f"ratio to the peer's best setting: {result['ratio_to_best']:.2f}x")


def main() -> None:
    """Print one table per geometry."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--geometry", choices=[*GEOMETRIES], default="small")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5, help="counted, after two that are not")
    parser.add_argument("--compiled", action="store_true", help="the peer compiled too (minutes)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        print(json.dumps(work(json.loads(args.work))))
        return
    result = compare(args, Console(stderr=args.json))
    if args.json:
        print(json.dumps(result))
    else:
        show(result, Console())


if __name__ == "__main__":
    main()
