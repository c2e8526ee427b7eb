"""Where two traces of the same probe part, and why.

A top-1 router turns a rounding error into another expert, and after that nothing is comparable. So
two things are kept apart. *Drift* is the difference of numbers that belong to the same computation.
A *flip* is a token that takes another class; it ends the comparison of that token there, and of all
later tokens of its document from the next layer on, as attention carries the difference to them.

A flip needs a gap between two biased probabilities to change by the reference's margin, so at least
one of them by half of it. Probabilities that differ by at most d explain flips of margins up to 2d;
d is the largest difference that was measured in the layer, or what fp32 may differ by where that is
more. Such a flip is a *near tie*; any other is *real*: a mistake in choosing, as in the balancing
biases.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from openzaya.checkpoint.dialects import differences
from openzaya.checkpoint.trace import Probe, stages
from openzaya.checkpoint.trace_file import Trace
from openzaya.errors import UserError

TOLERANCE = 2e-5
"""Accepted drift where both traces are computed in fp32."""

LOW_PRECISION_TOLERANCE = 5e-2
"""Accepted drift where one of them is not."""


@dataclass(frozen=True)
class Flip:
    """A token that takes another class though everything before it is comparable.

    Attributes:
        layer, row, column: where.
        reference, other: classes.
        margin: of the reference's choice over its second best; None if neither trace has it.
        explained: margins up to this are explained by the difference of the probabilities.
    """

    layer: int
    row: int
    column: int
    reference: int
    other: int
    margin: float | None
    explained: float

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.margin is not None and self.margin <= self.explained


@dataclass(frozen=True)
class Stage:
    """Comparison of one stage.

    Attributes:
        name: of the stage.
        tokens: how many were comparable.
        drift: largest absolute difference over the reference's largest magnitude, over those
            tokens; infinite where the reference is zero throughout and the other is not; None
            without such tokens or when a problem made it impossible.
        row, column: the token of the largest difference.
        problem: what is wrong other than drift.
        parts: whether this stage is beyond what is accepted.
    """

    name: str
    tokens: int
    drift: float | None = None
    row: int | None = None
    column: int | None = None
    problem: str | None = None
    parts: bool = False

    @property
    def layer(self) -> int | None:
        """Its layer, None outside of them."""
        return int(self.name.split(".")[1]) if self.name.startswith("layers.") else None


@dataclass(frozen=True)
class Comparison:
    """Result of `compare`.

    Attributes:
        tolerance: accepted drift.
        stages: those that both traces have, in the order of computation.
        flips: see `Flip`.
        followed: other choices that differ, of tokens that were not comparable any more.
        tokens: real tokens of the probe.
        missing: stages that the other trace lacks.
        extra: tensors of the other trace that the reference lacks, or that are no stage of it.
        config_differences: fields in which the two configurations differ.
    """

    tolerance: float
    stages: tuple[Stage, ...]
    flips: tuple[Flip, ...]
    followed: int
    tokens: int
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    config_differences: tuple[str, ...]

    @property
    def first(self) -> Stage | None:
        """The first stage at which the traces part, or None."""
        return next((stage for stage in self.stages if stage.parts), None)

    @property
    def agrees(self) -> bool:
        """Whether they never part; flips at near ties are allowed."""
        return self.first is None

    @property
    def uncompared(self) -> tuple[str, ...]:
        """Stages of which flips have left no comparable token."""
        return tuple(stage.name for stage in self.stages if not stage.tokens)

    def to_json(self) -> dict[str, Any]:
        """Nested dict of plain values; a drift that is not finite becomes the text "inf"."""

        def plain(value: Any) -> Any:
            return "inf" if isinstance(value, float) and not math.isfinite(value) else value

        return {
            "agrees": self.agrees,
            "first": None if self.first is None else self.first.name,
            "stages": [{k: plain(v) for k, v in asdict(s).items()} for s in self.stages],
            "flips": [
                {k: plain(v) for k, v in asdict(f).items()} | {"near_tie": f.near_tie}
                for f in self.flips
            ],
            **{
                name: getattr(self, name)
                for name in ("tolerance", "followed", "tokens", "missing", "extra")
            },
            "uncompared": self.uncompared,
            "config_differences": self.config_differences,
        }


def default_tolerance(reference: Trace, other: Trace) -> float:
    """Accepted drift for the compute dtypes of two traces."""
    same = reference.dtype == other.dtype == "float32"
    return TOLERANCE if same else LOW_PRECISION_TOLERANCE


def compare(reference: Trace, other: Trace, tolerance: float | None = None) -> Comparison:
    """Walk through all stages in the order of computation.

    A stage parts when its drift exceeds the tolerance, its shape differs, a real token has values
    that are not finite in either trace, or a token's choice flips without being a near tie. Stages
    that one of the traces lacks are listed and part nothing. Padding is not looked at.

    Args:
        tolerance: accepted drift; None takes `default_tolerance`.

    Raises:
        UserError: if the probes differ, or the traces have no stage in common.
    """
    _check_probes(reference.probe, other.probe)
    tolerance = default_tolerance(reference, other) if tolerance is None else tolerance
    shared = reference.tensors.keys() & other.tensors.keys()
    common = [name for name in stages(reference.config) if name in shared]
    if not common:
        raise UserError("the traces have no stage in common: there is nothing to compare")
    walk = _Walk(reference, other, tolerance)
    return Comparison(
        tolerance=tolerance,
        stages=tuple(walk.stage(name) for name in common),
        flips=tuple(walk.flips),
        followed=walk.followed,
        tokens=int(reference.probe.padding_mask.sum()),
        missing=tuple(name for name in reference.tensors if name not in shared),
        extra=tuple(name for name in other.tensors if name not in common),
        config_differences=tuple(differences(reference.config, other.config)),
    )


def _check_probes(a: Probe, b: Probe) -> None:
    for name in ("tokens", "positions", "padding_mask"):
        x, y = getattr(a, name), getattr(b, name)
        if x.shape != y.shape or not torch.equal(x, y):
            raise UserError(
                f"the traces are of different inputs: their probe.{name} differ. Run one of them "
                "again on the probe of the other"
            )


class _Walk:
    """Which tokens are still comparable, as the stages are passed one by one."""

    def __init__(self, reference: Trace, other: Trace, tolerance: float) -> None:
        self.reference, self.other, self.tolerance = reference, other, tolerance
        self.mask = reference.probe.padding_mask
        self.clean = self.mask.clone()
        self.layer: int | None = None
        self.flips: list[Flip] = []
        self.followed = 0
        documents = reference.probe.documents
        seq = documents.shape[1]
        # [rows, seq, seq]: the second token is in the first one's document and not after it.
        self.reaches = (documents[:, :, None] == documents[:, None]) & torch.ones(
            seq, seq, dtype=torch.bool
        ).tril()

    def stage(self, name: str) -> Stage:
        layer = Stage(name, 0).layer
        if layer is not None and layer != self.layer:
            # Earlier than need be: the projections of a layer see one token each.
            flipped = self.mask & ~self.clean
            self.clean &= ~(self.reaches & flipped[:, None]).any(-1)
        self.layer = layer
        x, y = self.reference.tensors[name], self.other.tensors[name]
        if x.shape != y.shape:
            return Stage(name, 0, problem=f"shape {list(y.shape)}, not {list(x.shape)}", parts=True)
        if x.shape[:2] != self.mask.shape:
            return Stage(name, 0, problem=f"shape {list(x.shape)} is not the probe's", parts=True)
        x, y = x.double(), y.double()
        for which, values in (("the reference", x), ("the other", y)):
            wrong = self.mask & ~values.isfinite().reshape(*self.mask.shape, -1).all(-1)
            if wrong.any():
                row, column = wrong.nonzero()[0].tolist()
                problem = f"{which} has values that are not finite"
                return Stage(name, int(self.clean.sum()), None, row, column, problem, parts=True)
        if name.endswith("router.chosen"):
            return self._choices(name, x.long(), y.long())
        return self._drift(name, x, y)

    def _drift(self, name: str, x: Tensor, y: Tensor) -> Stage:
        tokens = int(self.clean.sum())
        if not tokens:
            return Stage(name, 0)
        difference = _per_token(y - x).where(self.clean, 0.0)
        scale = float(_per_token(x).where(self.clean, 0.0).max())
        row, column = divmod(int(difference.argmax()), difference.shape[1])
        largest = float(difference.max())
        drift = largest / scale if scale else math.inf if largest else 0.0
        return Stage(name, tokens, drift, row, column, parts=drift > self.tolerance)

    def _choices(self, name: str, x: Tensor, y: Tensor) -> Stage:
        tokens = int(self.clean.sum())
        differs = (x != y) & self.mask
        flipped = differs & self.clean
        self.followed += int((differs & ~self.clean).sum())
        at = name.removesuffix("chosen")
        explained = self._explained(at + "probabilities")
        margins = self.reference.tensors.get(at + "margin", self.other.tensors.get(at + "margin"))
        usable = margins is not None and margins.shape == self.mask.shape
        assert self.layer is not None
        new = [
            Flip(
                layer=self.layer,
                row=row,
                column=column,
                reference=int(x[row, column]),
                other=int(y[row, column]),
                margin=float(margins[row, column]) if margins is not None and usable else None,
                explained=explained,
            )
            for row, column in flipped.nonzero().tolist()
        ]
        self.flips += new
        self.clean &= ~flipped
        real = [flip for flip in new if not flip.near_tie]
        if not real:
            return Stage(name, tokens, 0.0 if tokens else None)
        worst = max(real, key=lambda flip: math.inf if flip.margin is None else flip.margin)
        problem = f"{len(real)} real flip" + "s" * (len(real) > 1)
        return Stage(name, tokens, None, worst.row, worst.column, problem, parts=True)

    def _explained(self, name: str) -> float:
        """Twice what probabilities of comparable tokens differ by, or may differ by in fp32.

        Tokens that flip count: flips happen just where the difference is large, and if it is larger
        than accepted, the stage of the probabilities has parted already.
        """
        x, y = self.reference.tensors.get(name), self.other.tensors.get(name)
        accepted = min(self.tolerance, TOLERANCE)  # no probability is larger than 1
        if x is None or y is None or x.shape != y.shape or not self.clean.any():
            return 2 * accepted
        x, y = x.double()[self.clean], y.double()[self.clean]
        measured = float((y - x).abs().max())
        accepted *= float(x.abs().max())
        return 2 * (max(measured, accepted) if math.isfinite(measured) else accepted)


def _per_token(x: Tensor) -> Tensor:
    """[rows, seq, ...] -> [rows, seq] largest magnitude."""
    return x.abs().reshape(*x.shape[:2], -1).amax(-1)
