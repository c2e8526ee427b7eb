"""Curves of loss against size, and what they say about equal loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from openzaya.errors import UserError

NEAR = 2.0
"""How far outside the measured range, as a factor, a curve is still asked."""


@dataclass(frozen=True)
class PowerLaw:
    """loss = b * x^-c.

    Attributes:
        b, c: the law's.
        low, high: range of x that it was fitted on.
        error: root mean square of the relative differences of the points to the law.
    """

    b: float
    c: float
    low: float
    high: float
    error: float

    def __call__(self, x: float) -> float:
        """The loss at x."""
        return self.b * x**-self.c

    def inverse(self, loss: float) -> float | None:
        """The x at which the law gives a loss.

        None where that lies more than `NEAR` times outside the measured range, and where the
        measured loss did not fall with x.
        """
        if self.c <= 0:
            return None
        x = math.exp(math.log(self.b / loss) / self.c)
        return x if self.low / NEAR <= x <= self.high * NEAR else None


def fit_power_law(xs: Sequence[float], losses: Sequence[float]) -> PowerLaw:
    """Least squares of log loss against log x.

    The usual law of scaling has an irreducible loss as well, a + b x^-c. With three sizes it has
    as many parameters as there are points: it goes through all of them whatever they are, noise
    included, and what it says beyond them is noise made large. One `a` for all variants would be
    held by a handful of points more, but it is a property of the text that sizes which differ by
    a small factor cannot show: their loss is far above it, and there a straight line in logarithms
    is as near as the two-seed noise. So there is no `a`; such a law must not be carried far beyond
    the sizes it was fitted on, which `inverse` sees to.

    Args:
        xs: FLOPs or parameters, above 0.
        losses: as many, above 0.

    Raises:
        UserError: if there are fewer than two different sizes, or values that are not positive.
    """
    if len(set(xs)) < 2:
        raise UserError("a curve needs runs of at least two sizes")
    if min(xs) <= 0 or min(losses) <= 0:
        raise UserError("a power law needs sizes and losses above 0")
    log_x, log_loss = [math.log(x) for x in xs], [math.log(loss) for loss in losses]
    mean_x, mean_loss = math.fsum(log_x) / len(xs), math.fsum(log_loss) / len(xs)
    spread = math.fsum((x - mean_x) ** 2 for x in log_x)
    slope = math.fsum((x - mean_x) * (y - mean_loss) for x, y in zip(log_x, log_loss, strict=True))
    c = -slope / spread
    b = math.exp(mean_loss + c * mean_x)
    law = PowerLaw(b, c, min(xs), max(xs), 0.0)
    squares = [(loss / law(x) - 1) ** 2 for x, loss in zip(xs, losses, strict=True)]
    return PowerLaw(b, c, law.low, law.high, math.sqrt(math.fsum(squares) / len(squares)))
