"""Which source fills which sequence slot of a phase: closed form, any slot at any time.

Slots come in blocks. After b blocks of B slots, the first j sources together own exactly
floor(W_j * b * B / W) slots, where W_j is the sum of their integer weights and W the sum of all:
the counts of every block telescope, so shares are exact to one slot over any number of blocks. With
B >= W / w_min no count is ever negative. Inside a block a computed permutation orders the slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from itertools import pairwise
from math import lcm

import numpy as np
import numpy.typing as npt

from openzaya.data.permutation import permutation
from openzaya.errors import UserError

_Layout = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], list[int]]

SMALLEST_BLOCK = 256
SMALLEST_SHARE = 1e-5  # a block holds 1 / share slots, so this bounds its size


class Mixture:
    """Assignment of the slots of one phase to its sources."""

    def __init__(self, shares: Mapping[str, float], *keys: int | str) -> None:
        """Args: `shares` of any sum, zero ones get no slots; `keys` (seed, phase) name the order.

        Raises:
            UserError: if a share is positive but below `SMALLEST_SHARE` of the sum.
        """
        total = sum(shares.values())
        for name, share in shares.items():
            if 0 < share < SMALLEST_SHARE * total:
                raise UserError(
                    f"the share of source {name!r} in the mixture is {share / total:.1e}, below "
                    f"{SMALLEST_SHARE:.0e}: raise it, or set it to 0 to leave the source out"
                )
        # str() first: 0.1 shall mean one tenth, not the double next to it.
        exact = {name: Fraction(str(share)) for name, share in shares.items() if share > 0}
        if not exact:
            raise UserError("the shares of the mixture sum to zero: give at least one source some")
        scale = lcm(*(fraction.denominator for fraction in exact.values()))
        weights = [int(fraction * scale) for fraction in exact.values()]
        self.sources = tuple(exact)
        self._bounds = [sum(weights[:j]) for j in range(len(weights) + 1)]
        self._keys = keys
        self.block = max(SMALLEST_BLOCK, -(-self._bounds[-1] // min(weights)))
        self._latest = (0, self._layout(0))  # steps come in order: one block is kept

    def _owned(self, blocks: int) -> list[int]:
        """Slots of each source in the first `blocks` blocks."""
        slots = blocks * self.block
        edges = [bound * slots // self._bounds[-1] for bound in self._bounds]
        return [high - low for low, high in pairwise(edges)]

    def _layout(self, block: int) -> _Layout:
        """Source of each slot of a block [B], its rank within the block [B], ordinals before."""
        before, after = self._owned(block), self._owned(block + 1)
        counts = [a - b for a, b in zip(after, before, strict=True)]
        labels = np.repeat(np.arange(len(counts)), counts)
        labels = labels[permutation(self.block, "mixture", block, *self._keys)]
        ranks = np.empty(self.block, dtype=np.int64)
        for j, count in enumerate(counts):
            ranks[labels == j] = np.arange(count)
        return labels, ranks, before

    def assign(self, slot: int) -> tuple[str, int]:
        """The source of a slot, and the slot's ordinal among all slots of that source.

        Over slots 0, 1, 2, ... the ordinals of each source are 0, 1, 2, ... in this order.
        """
        block, place = divmod(slot, self.block)
        known, layout = self._latest
        if known != block:
            layout = self._layout(block)
            self._latest = (block, layout)
        labels, ranks, before = layout
        source = int(labels[place])
        return self.sources[source], before[source] + int(ranks[place])
