"""The report of an ablation: tables for people, `table.md`, `summary.json` and a figure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from openzaya.ablation.summary import Row, Summary
from openzaya.checkpoint.atomic import write_text

SUMMARY, TABLE, FIGURE = "summary.json", "table.md", "curves.png"

COLUMNS = ("variant", "total", "active", "FLOPs", "loss", "to standard", "equal loss")
NOTES = (
    "loss: held-out nats per token, mean over sources; +- half the range over seeds. Parameters "
    "are without embeddings. to standard: loss minus that of the standard MoE with the same seed. "
    "equal loss: FLOPs that the standard MoE needs for this loss, by its fitted curve, over those "
    "spent; its own rows tell how far it lies off its curve.",
    "law: loss = b x^-c, least squares in logarithms over all runs; not to be carried far beyond "
    "the sizes measured.",
)
_AXIS_NAMES = {
    "training_flops": "training FLOPs",
    "active": "active parameters",
    "total": "total parameters",
}


def write_report(summary: Summary, out: Path, plot: bool) -> list[Path]:
    """Write `summary.json`, `table.md` and, if asked, `curves.png`.

    Returns:
        The files.

    Raises:
        UserError: if they cannot be written, or matplotlib is missing.
    """
    write_text(out / SUMMARY, json.dumps(summary.to_json(), indent=1) + "\n")
    write_text(out / TABLE, markdown(summary))
    files = [out / SUMMARY, out / TABLE]
    if plot:
        from openzaya.ablation.plots import draw

        draw(summary, out / FIGURE)
        files.append(out / FIGURE)
    return files


def show(summary: Summary, console: Console) -> None:
    """Print tables within 80 columns."""
    for title, columns, rows in _tables(summary):
        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        table.width = min(78, console.width)
        for number, column in enumerate(columns):
            table.add_column(column, justify="right" if number else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table, highlight=False)
    for note in NOTES:
        console.print(note, style="dim", highlight=False)


def markdown(summary: Summary) -> str:
    """The same tables for a document."""
    lines = [
        "# Ablation",
        "",
        f"{summary.steps:,} steps and {summary.tokens:,} tokens a run.",
        "",
    ]
    for title, columns, rows in _tables(summary):
        lines += [f"**{title}**", "", _line(columns), _line(["---", *["--:"] * (len(columns) - 1)])]
        lines += [*(_line(row) for row in rows), ""]
    lines += [note + "\n" for note in NOTES]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _tables(summary: Summary) -> Iterable[tuple[str, Sequence[str], list[list[str]]]]:
    """Title, columns and rows of every table."""
    for size in summary.sizes:
        rows = [row for row in summary.rows if row.size == size]
        yield _title(size, rows), COLUMNS, [_cells(row) for row in rows]
    sources = list(dict.fromkeys(name for row in summary.rows for name in row.heldout))
    for start in range(0, len(sources), 4):  # of more columns, none could be read
        part = sources[start : start + 4]
        yield (
            "held-out loss by source, nats per token",
            ("size", "variant", *part, "least balance"),
            [
                [
                    str(row.size),
                    row.variant,
                    *(f"{row.heldout[name]:.4f}" if name in row.heldout else "-" for name in part),
                    f"{row.load_entropy:.3f}",
                ]
                for row in summary.rows
            ],
        )
    laws = [
        [
            variant,
            _AXIS_NAMES[axis],
            f"{law.b:.4g}",
            f"{law.c:.4f}",
            f"{law.error:.2%}",
        ]
        for axis, curves in summary.curves.items()
        for variant, law in curves.items()
    ]
    if laws:
        yield "law by variant", ("variant", "x", "b", "c", "rms error"), laws


def _title(size: int, rows: Sequence[Row]) -> str:
    counts = sorted({len(row.seeds) for row in rows})
    seeds = " to ".join(map(str, (counts[0], counts[-1]) if len(counts) > 1 else counts))
    return f"size {size}, {seeds} seed{'' if counts == [1] else 's'}"


def _cells(row: Row) -> list[str]:
    return [
        row.variant,
        _millions(row.total),
        _millions(row.active),
        f"{row.training_flops:.3g}".replace("e+", "e"),
        _with_spread(f"{row.loss:.4f}", row.half_range),
        ""
        if row.difference is None
        else _with_spread(f"{row.difference:+.4f}", row.difference_half_range),
        "-" if row.equal_loss_flops is None else f"{row.equal_loss_flops:.2f}x",
    ]


def _with_spread(text: str, spread: float | None) -> str:
    return text if spread is None else f"{text} ±{spread:.3f}"


def _millions(count: int) -> str:
    return f"{count / 1e6:.3f}M" if count < 1e8 else f"{count / 1e9:.3f}B"
