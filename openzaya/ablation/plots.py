"""The ablation's figure; the only place that needs matplotlib."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path

from openzaya.ablation.summary import Summary
from openzaya.checkpoint.atomic import write_bytes
from openzaya.errors import UserError

_COLORS = {
    "standard": "#555555",
    "cca": "#0072b2",
    "router": "#e69f00",
    "residual": "#009e73",
    "moe++": "#d55e00",
}
"""Told apart in print and by most eyes."""

_PANELS = {"training_flops": "training FLOPs", "active": "active parameters, without embeddings"}


def check_matplotlib() -> None:
    """Fail before the long work, not after it.

    Raises:
        UserError: if matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            "the figure needs matplotlib, which is in the extra `plot`: "
            "pip install 'openzaya[plot]', or leave the figure out with --no-plot."
        )


def draw(summary: Summary, file: Path) -> None:
    """Loss against training FLOPs, and against active parameters: points, spread and fitted laws.

    Args:
        file: a PNG, written whole or not at all.

    Raises:
        UserError: if matplotlib is missing, or the file cannot be written.
    """
    check_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    for panel, (axis, label) in zip(
        figure.subplots(1, 2, sharey=True), _PANELS.items(), strict=True
    ):
        for variant in summary.variants:
            rows = [row for row in summary.rows if row.variant == variant]
            color = _COLORS[variant]
            panel.errorbar(
                [getattr(row, axis) for row in rows],
                [row.loss for row in rows],
                yerr=[row.half_range or 0.0 for row in rows],
                fmt="o",
                markersize=4,
                capsize=2,
                color=color,
                label=variant,
            )
            law = summary.curves[axis].get(variant)
            if law is not None:
                steps = [law.low * (law.high / law.low) ** (i / 40) for i in range(41)]
                panel.plot(steps, [law(x) for x in steps], color=color, linewidth=1)
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter(ScalarFormatter())
        panel.yaxis.set_minor_formatter(ScalarFormatter())
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.set_xlabel(label)
        panel.grid(visible=True, which="both", linewidth=0.3)
    panels = figure.axes
    panels[0].set_ylabel("held-out loss, nats per token")
    panels[1].legend(frameon=False)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    write_bytes(file, content.getvalue())
