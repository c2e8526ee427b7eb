"""What the benchmarks of training share: geometries, processes that measure, tables, pictures.

Nothing here imports torch, so that the process which asks takes neither memory nor threads from
those that are measured (`worker.py`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from rich import box
from rich.console import Console
from rich.table import Table

from openzaya.model.accounting import forward_flops
from openzaya.model.config import PRESETS, ModelConfig

GEOMETRIES = {
    # 12.8M parameters, 4.6M of them active: what the peers' published figures are given for.
    "small": PRESETS["small"].model_copy(
        update={
            "vocab_size": 8192,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "max_position_embeddings": 16_384,
        }
    ),
    # 360M parameters, 42M of them active.
    "mid": PRESETS["small"].model_copy(
        update={
            "vocab_size": 8192,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 8,
            "head_dim": 64,
            "num_experts": 16,
            "moe_intermediate_size": 768,
            "router_hidden_size": 128,
            "max_position_embeddings": 16_384,
        }
    ),
}

ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**26),
}
"""For all processes alike: freed memory stays in the process."""

PARTS = ("forward body", "head and loss", "backward", "optimizer")
"""Of a step. The peer's head and loss are part of its forward body."""


class Job(BaseModel):
    """One training step in one setting: what a worker is started with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: ModelConfig
    batch: int = 8
    context: int = 512
    side: Literal["ours", "peer"] = "ours"
    dtype: Literal["bf16", "fp32"] = "bf16"
    recompute: Literal["none", "attention", "experts", "full"] = "none"
    experts: Literal["grouped_mm", "eager"] = "grouped_mm"
    compiled: bool = False
    threads: int = 2

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.batch * self.context

    @property
    def flops(self) -> float:
        """Of the products of one step: three forwards, attention's scores included."""
        return 3 * forward_flops(self.config, self.context).total * self.tokens


class WorkerFailed(Exception):
    """A worker ended before it answered."""


class Worker:
    """A process of its own that holds one model and trains it on request.

    Attributes:
        start_mib: its size after all imports and a step of a tiny model: code, not data.
    """

    def __init__(self, job: Job) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in __exit__)
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("worker.py")), job.model_dump_json()],
            env={**os.environ, **ALLOCATOR, "OMP_NUM_THREADS": str(job.threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.start_mib: float = self._answer()["start_mib"]

    def ask(self, what: str, count: int = 1) -> dict[str, Any]:
        """Have something done and measured; see `worker.py` for what there is.

        Raises:
            WorkerFailed: if the process ends instead.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(what, count, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._log.seek(0)
            told = self._log.read().strip().splitlines()
            reason = "killed, most likely for its memory" if code == -9 else f"ended with {code}"
            raise WorkerFailed(": ".join([reason, *told[-1:]]))
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        self._process.communicate()
        self._log.close()


@dataclass
class Measured:
    """What was measured of one job.

    Attributes:
        rounds: per turn and step, the seconds of each of `PARTS`.
        losses: of every step, uncounted ones included, since the model was made.
        peak_mib: largest size of the process, beyond what it had without this model.
        start_mib: that: after all imports and a step of a tiny model.
    """

    rounds: list[list[list[float]]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_mib: float = 0.0
    start_mib: float = 0.0

    def take(self, worker: Worker, steps: int, warmup: int = 0) -> None:
        """One turn of `steps` steps, after `warmup` that are not counted."""
        answers = [worker.ask("steps", warmup)] if warmup else []
        answers.append(worker.ask("steps", steps))
        self.losses += [loss for answer in answers for loss in answer["losses"]]
        self.rounds.append(answers[-1]["parts"])
        self.start_mib = worker.start_mib
        self.peak_mib = max(self.peak_mib, answers[-1]["peak_mib"] - worker.start_mib)

    @property
    def parts(self) -> list[float]:
        """Median seconds of each of `PARTS`."""
        steps = [step for turn in self.rounds for step in turn]
        return [statistics.median(column) for column in zip(*steps, strict=True)]

    @property
    def seconds(self) -> list[float]:
        """Of every step."""
        return [sum(step) for turn in self.rounds for step in turn]

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds)

    @property
    def without_optimizer(self) -> float:
        """Median seconds of a step's forward and backward."""
        return statistics.median(sum(step[:-1]) for turn in self.rounds for step in turn)

    def ratio_to(self, other: Measured) -> float:
        """Seconds over the other's, turn by turn: both saw the same state of the machine."""
        pairs = zip(self.rounds, other.rounds, strict=True)
        return statistics.median(
            statistics.median(map(sum, mine)) / statistics.median(map(sum, theirs))
            for mine, theirs in pairs
        )

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "seconds": self.seconds,
            "median": self.median,
            "parts": dict(zip(PARTS, self.parts, strict=True)),
            "losses": self.losses,
            "peak_mib": self.peak_mib,
            "start_mib": self.start_mib,
        }


def alternate(
    jobs: Mapping[str, Job], rounds: int, steps: int, warmup: int = 2, together: bool = True
) -> dict[str, Measured]:
    """Jobs in turns, `rounds` times round, so that a machine whose speed drifts treats them alike.

    Args:
        steps: counted in a turn.
        warmup: steps that are not counted, of every new process.
        together: all processes live through all rounds; otherwise each turn has a new one, which
            takes longer, but only one model is in memory at a time.

    Raises:
        WorkerFailed: if one of them does.
    """
    results = {name: Measured() for name in jobs}
    with contextlib.ExitStack() as stack:
        alive: dict[str, Worker] = {}
        for turn in range(rounds):
            for name, job in jobs.items():
                if not together:
                    with Worker(job) as worker:
                        results[name].take(worker, steps, warmup)
                    continue
                if name not in alive:
                    alive[name] = stack.enter_context(Worker(job))
                    alive[name].ask("steps", 0)
                results[name].take(alive[name], steps, 0 if turn else warmup)
    return results


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table of figures; the first column is text."""
    result = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for i, column in enumerate(columns):
        result.add_column(column, justify="right" if i else "left", no_wrap=not i)
    for row in rows:
        result.add_row(*row)
    return result


def milliseconds(seconds: float) -> str:
    """1,234 or 12.3."""
    value = 1e3 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def spread(seconds: Sequence[float]) -> str:
    """Fastest and slowest, in milliseconds."""
    return f"{1e3 * min(seconds):,.0f}-{1e3 * max(seconds):,.0f}"


def figure(path: Path | None, panels: int, console: Console) -> tuple[Any, list[Any]] | None:
    """A matplotlib figure and its panels, or None if none is wanted or can be drawn."""
    if path is None:
        return None
    try:
        from matplotlib.figure import Figure
    except ImportError:
        console.print(f"{path} is not drawn: it needs matplotlib (pip install 'openzaya[plot]')")
        return None
    columns = min(panels, 3)
    rows = math.ceil(panels / columns)
    drawing = Figure(figsize=(5 * columns, 4 * rows), layout="constrained")
    axes = list(drawing.subplots(rows, columns, squeeze=False).flat)
    for axis in axes[panels:]:
        axis.remove()
    return drawing, axes[:panels]
