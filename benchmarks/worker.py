"""One training step of one side, measured in a process of its own; the other benchmarks start it.

    python benchmarks/worker.py JOB

JOB is a `common.Job` as JSON. First comes a line with the size of the process after a step of a
tiny model, that is, with all code loaded. Then every line on stdin is answered with one of JSON:

    steps N     train N steps on new batches: seconds of each part, losses, largest size so far
    profile N   the operations that N steps spend most time in
    matrices    FLOP/s of a 2048 x 2048 x 2048 product in bf16 and fp32
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from common import Job
from torch import Tensor, nn

from openzaya.kernels.allocator import reuse_freed_memory
from openzaya.model.config import PRESETS
from openzaya.model.init import init_weights
from openzaya.model.model import Zaya

Body = Callable[[Tensor], Tensor]
Head = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(job: Job) -> tuple[Zaya, Body, Head]:
    """Our model, tokens -> hidden, and (hidden, tokens, targets) -> mean loss."""
    model = Zaya(job.config, torch.bfloat16 if job.dtype == "bf16" else torch.float32)
    init_weights(model, 0)
    model.recompute = job.recompute

    def head(hidden: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:
        return model.loss(hidden, targets) / (targets >= 0).sum()

    return model, lambda tokens: model(tokens).hidden, head


def peer(job: Job) -> tuple[nn.Module, Body, Head]:
    """The same of `transformers` with our weights; its head computes the whole loss."""
    from transformers import ZayaConfig, ZayaForCausalLM

    from openzaya.checkpoint.dialects import write_config

    config = ZayaConfig(**write_config(job.config, "C"))
    config._experts_implementation = job.experts
    weights, _, _ = ours(job)
    model = ZayaForCausalLM(config)
    loaded = model.load_state_dict(weights.state_dict(), strict=False)
    assert not loaded.unexpected_keys, loaded
    assert loaded.missing_keys == ["lm_head.weight"], loaded  # tied to the embedding
    assert model.config._experts_implementation == job.experts
    run = torch.compile(model) if job.compiled else model

    def head(_: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:
        low = torch.autocast("cpu", torch.bfloat16)
        with low if job.dtype == "bf16" else contextlib.nullcontext():
            result: Tensor = run(tokens, labels=tokens, use_cache=False).loss
        return result

    return model, lambda tokens: tokens, head


class Training:
    """One side's model with its optimizer and data."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.model, self.body, self.head = ours(job) if job.side == "ours" else peer(job)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.generator = torch.Generator().manual_seed(1)

    def step(self) -> tuple[float, list[float]]:
        """Loss, and seconds of body, head and loss, backward, optimizer."""
        shape = (self.job.batch, self.job.context)
        tokens = torch.randint(3, self.job.config.vocab_size, shape, generator=self.generator)
        targets = tokens.roll(-1, 1)
        targets[:, -1] = -100
        marks = [time.perf_counter()]
        hidden = self.body(tokens)
        marks.append(time.perf_counter())
        loss = self.head(hidden, tokens, targets)
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        self.optimizer.step()
        self.optimizer.zero_grad()
        marks.append(time.perf_counter())
        return float(loss.detach()), [b - a for a, b in pairwise(marks)]

    def steps(self, count: int) -> dict[str, Any]:
        """Train."""
        done = [self.step() for _ in range(count)]
        return {
            "losses": [loss for loss, _ in done],
            "parts": [parts for _, parts in done],
            "peak_mib": largest_size(),
        }

    def profile(self, count: int) -> dict[str, Any]:
        """Own time of the operations that take most of it: ms and calls in a step, and share."""
        with torch.profiler.profile() as profiler:
            self.steps(count)
        events = sorted(profiler.key_averages(), key=lambda e: -e.self_cpu_time_total)
        total = sum(e.self_cpu_time_total for e in events)
        return {
            "operations": [
                {
                    "name": e.key,
                    "ms": e.self_cpu_time_total / count / 1e3,
                    "calls": e.count / count,
                    "share": e.self_cpu_time_total / total,
                }
                for e in events[:16]
            ]
        }


def matrices(size: int = 2048) -> dict[str, Any]:
    """FLOP/s of a large product, the best of many."""
    rates = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
        best = float("inf")
        for _ in range(20):
            started = time.perf_counter()
            a @ b
            best = min(best, time.perf_counter() - started)
        rates[name] = 2 * size**3 / best
    return rates


def largest_size() -> float:
    """Of this process so far, in MiB.

    Linux keeps it per program; `ru_maxrss` would start with the size of the process that forked.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def main() -> None:
    """Answer until stdin ends."""
    with contextlib.suppress(OSError):  # where memory runs out, we go, and nobody else
        Path("/proc/self/oom_score_adj").write_text("1000")
    answers = sys.stdout
    sys.stdout = sys.stderr  # what libraries print
    job = Job.model_validate_json(sys.argv[1])
    reuse_freed_memory()
    torch.set_num_threads(job.threads)
    tiny = {"config": PRESETS["tiny"], "batch": 1, "context": 64, "compiled": False}
    Training(job.model_copy(update=tiny)).step()
    print(json.dumps({"start_mib": largest_size()}), file=answers, flush=True)
    training = Training(job)
    for line in sys.stdin:
        what, count = line.split()
        if what == "steps":
            answer = training.steps(int(count))
        elif what == "profile":
            answer = training.profile(int(count))
        else:
            answer = matrices()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
