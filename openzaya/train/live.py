"""What the user sees while a run trains."""

from __future__ import annotations

import time
from collections import deque
from itertools import pairwise
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from openzaya.config.recipe import PhaseConfig, Recipe

_BARS = "▁▂▃▄▅▆▇█"
_PLAIN_EVERY = 10.0
"""Seconds between lines when the output is not a terminal."""


class LiveView:
    """A live panel on a terminal, and a line now and then elsewhere.

    Args:
        recipe: names the phases.
        console: where to draw.
        start_step: optimizer steps done before.
    """

    def __init__(self, recipe: Recipe, console: Console, start_step: int) -> None:
        self._recipe = recipe
        self._console = console
        self._losses: deque[float] = deque(maxlen=2000)
        self._heldout: dict[str, float] = {}
        self._record: dict[str, Any] = {}
        self._step = start_step
        self._recent: deque[tuple[int, int, float]] = deque(maxlen=20)
        """Real tokens, tokens with padding, and seconds of the last steps."""
        self._last_line = 0.0
        self._live = (
            Live(console=console, refresh_per_second=4, transient=False)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def step(self, record: dict[str, Any]) -> None:
        """Show the record of a finished step."""
        self._step = record["step"]
        self._record = record
        self._losses.append(record["loss"])
        index, step = self._recipe.locate(self._step - 1)
        phase = self._recipe.phases[index]
        padded = phase.sequences(step) * phase.context
        self._recent.append((record["step_tokens"], padded, record["seconds"]))
        if self._live is not None:
            self._live.update(self._panel())
        elif time.monotonic() - self._last_line > _PLAIN_EVERY or self._done():
            self._last_line = time.monotonic()
            self._console.print(self._line(), highlight=False, soft_wrap=True)

    def heldout(self, losses: dict[str, float]) -> None:
        """Show new held-out losses."""
        self._heldout = losses
        if self._live is not None:
            if self._record:  # a resumed run may evaluate before its first step
                self._live.update(self._panel())
        else:
            shown = "  ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
            self._console.print(f"  held-out  {shown}", highlight=False)

    def note(self, text: str) -> None:
        """Say something that stays on the screen."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _phase(self) -> PhaseConfig:
        """Phase of the step that was shown last."""
        return self._recipe.phases[self._recipe.locate(self._step - 1)[0]]

    def _done(self) -> bool:
        return self._step >= self._recipe.total_steps

    def _rate(self) -> float:
        """Real tokens a second."""
        real, _, seconds = zip(*self._recent, strict=True)
        return sum(real) / sum(seconds)

    def _eta(self) -> str:
        """Time left, by the tokens that are left, padding included on both sides."""
        left, done = 0, self._step
        for phase in self._recipe.phases:
            left += phase.total_tokens - phase.slot(min(done, phase.steps)) * phase.context
            done = max(done - phase.steps, 0)
        _, padded, spent = zip(*self._recent, strict=True)
        seconds = int(left * sum(spent) / sum(padded))
        hours, minutes = seconds // 3600, seconds % 3600 // 60
        return (
            f"{hours}:{minutes:02}:{seconds % 60:02}" if hours else f"{minutes}:{seconds % 60:02}"
        )

    def _line(self) -> str:
        r = self._record
        entropy = min(r["load_entropy"])
        return (
            f"step {r['step']:>5}/{self._recipe.total_steps}  {r['phase']:<9} "
            f"loss {r['loss']:.3f}  balance {entropy:.3f}  "
            f"{self._rate():,.0f} tok/s  {self._eta()} left"
        )

    def _panel(self) -> Group:
        r = self._record
        total = self._recipe.total_steps
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(f"phase {r['phase']}", style="bold"),
            f"step {r['step']}/{total}",
            f"{self._rate():,.0f} tokens/s",
            f"{self._eta()} left",
        )
        numbers = Table.grid(padding=(0, 2))
        numbers.add_row("loss", f"{r['loss']:.3f}", Text(_spark(list(self._losses), 44), "cyan"))
        numbers.add_row("lr", f"{r['lr']:.1e}", f"gradient norm {r['grad_norm']:.2f}")
        layers = Text("".join(_bar(h) for h in r["load_entropy"]), style="green")
        layers.append(f"  least even layer {min(r['load_entropy']):.3f}", style="default")
        layers.append(f", skipped {max(r['skip_share']):.1%}", style="default")
        numbers.add_row("balance", "", layers)
        if self._heldout:
            shown = "  ".join(f"{name} {loss:.3f}" for name, loss in self._heldout.items())
            numbers.add_row("held-out", "", shown)
        bar = Table.grid()  # alone, the bar would not end its line
        bar.add_row(ProgressBar(total=total, completed=r["step"], width=72))
        return Group(head, bar, numbers)


def _bar(share: float) -> str:
    return _BARS[min(int(share * len(_BARS)), len(_BARS) - 1)]


def _spark(values: list[float], width: int) -> str:
    """A line of block characters, each the mean of an equal stretch of `values`."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    return "".join(_bar((mean - low) / (high - low + 1e-9)) for mean in means)
