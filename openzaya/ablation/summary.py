"""Means over seeds, differences to the baseline, and curves: all that a report says."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from openzaya.ablation.fit import PowerLaw, fit_power_law
from openzaya.ablation.result import Result
from openzaya.ablation.variants import BASELINE, VARIANTS
from openzaya.errors import UserError

AXES: dict[str, Callable[[Result], float]] = {
    "training_flops": lambda result: result.training_flops,
    "active": lambda result: float(result.active),
    "total": lambda result: float(result.total),
}
"""What curves are fitted against."""


@dataclass(frozen=True)
class Row:
    """A variant at one size.

    Attributes:
        seeds: that are finished.
        total, active: parameters without embeddings.
        training_flops: of one run.
        loss: held-out nats per token, mean over sources and seeds.
        half_range: half of largest minus smallest over seeds; None for one seed.
        heldout: by source, mean over seeds.
        difference: mean of loss minus the baseline's of the same seed; None without any.
        difference_half_range: half the range of these differences; None for one seed.
        equal_loss_flops: how many times this variant's FLOPs the baseline needs, by its own curve,
            to reach this loss; None where that lies too far outside the measured range. The
            baseline's own figure tells how far its points lie off its curve.
        load_entropy: of the least even layer late in training, mean over seeds.
    """

    size: int
    variant: str
    seeds: tuple[int, ...]
    total: int
    active: int
    training_flops: float
    loss: float
    half_range: float | None
    heldout: dict[str, float]
    difference: float | None
    difference_half_range: float | None
    equal_loss_flops: float | None
    load_entropy: float


@dataclass(frozen=True)
class Summary:
    """An ablation so far.

    Attributes:
        steps, tokens: of every run.
        rows: by size, in the order of `VARIANTS`.
        curves: by axis (`AXES`) and variant, fitted to all its runs; only where there are at least
            two sizes.
    """

    steps: int
    tokens: int
    rows: tuple[Row, ...]
    curves: dict[str, dict[str, PowerLaw]]

    @property
    def sizes(self) -> tuple[int, ...]:
        """All sizes with a finished run, ascending."""
        return tuple(dict.fromkeys(row.size for row in self.rows))

    @property
    def variants(self) -> tuple[str, ...]:
        """All variants with a finished run, in the order of `VARIANTS`."""
        return tuple(v for v in VARIANTS if any(row.variant == v for row in self.rows))

    def to_json(self) -> dict[str, Any]:
        """Nested dict of plain numbers."""
        return asdict(self)


def summarise(results: Sequence[Result]) -> Summary:
    """Everything that can be said of the finished runs.

    Raises:
        UserError: if there are none, or they were trained for different numbers of steps.
    """
    if not results:
        raise UserError("no run is finished yet, so there is nothing to report.")
    if len({result.steps for result in results}) > 1:
        raise UserError("the finished runs have different numbers of steps; they do not compare.")
    curves: dict[str, dict[str, PowerLaw]] = {}
    for axis, value in AXES.items():
        curves[axis] = {}
        for variant in VARIANTS:
            own = [r for r in results if r.variant == variant]
            if len({r.size for r in own}) > 1:
                curves[axis][variant] = fit_power_law(
                    [value(r) for r in own], [r.loss for r in own]
                )
    baseline = curves["training_flops"].get(BASELINE)
    rows = []
    for size in sorted({result.size for result in results}):
        for variant in VARIANTS:
            own = [r for r in results if (r.size, r.variant) == (size, variant)]
            if own:
                rows.append(_row(own, [r for r in results if r.size == size], baseline))
    return Summary(results[0].steps, results[0].tokens, tuple(rows), curves)


def _row(own: list[Result], of_size: list[Result], baseline: PowerLaw | None) -> Row:
    own = sorted(own, key=lambda r: r.seed)
    first, losses = own[0], [r.loss for r in own]
    theirs = {r.seed: r.loss for r in of_size if r.variant == BASELINE}
    differences = [r.loss - theirs[r.seed] for r in own if r.seed in theirs]
    if first.variant == BASELINE:
        differences = []
    loss = statistics.mean(losses)
    needed = None if baseline is None else baseline.inverse(loss)
    return Row(
        size=first.size,
        variant=first.variant,
        seeds=tuple(r.seed for r in own),
        total=first.total,
        active=first.active,
        training_flops=first.training_flops,
        loss=loss,
        half_range=half_range(losses),
        heldout={
            source: statistics.mean(r.heldout[source] for r in own) for source in first.heldout
        },
        difference=statistics.mean(differences) if differences else None,
        difference_half_range=half_range(differences),
        equal_loss_flops=None if needed is None else needed / first.training_flops,
        load_entropy=statistics.mean(r.load_entropy for r in own),
    )


def half_range(values: Sequence[float]) -> float | None:
    """Half the range: two or three seeds allow no better measure."""
    return (max(values) - min(values)) / 2 if len(values) > 1 else None
