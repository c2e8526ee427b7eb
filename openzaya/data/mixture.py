"""Which source fills which sequence slot of a phase: closed form, any slot at any time.

Slots come in blocks. After b blocks of B slots, the first j sources together own exactly
floor(W_j * b * B / W) slots, where W_j is the sum of their integer weights and W the sum of all:
the counts of every block telescope, so shares are exact to one slot over any number of blocks. With
B >= W / w_min no count is ever negative. Inside a block a computed permutation orders the slots.

Where shares move within a phase (a curriculum), a share may come from zero or go there, and the
closed form would give negative counts. A table of at most `CURRICULUM_BLOCKS` blocks is settled
beforehand instead: each block's slots go, by largest remainder, to the sources that lack most of
what their shares so far add up to.
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
CURRICULUM_BLOCKS = 4096
SMALLEST_SHARE = 1e-5  # a block holds 1 / share slots, so this bounds its size


class Mixture:
    """Assignment of the slots of one phase to its sources."""

    def __init__(
        self,
        shares: Mapping[str, float],
        *keys: int | str,
        final: Mapping[str, float] | None = None,
        slots: int = 0,
    ) -> None:
        """Gives slots to sources.

        Args:
            shares: Of any sum; sources with none get no slots.
            keys: Seed and phase; they name the order.
            final: Shares at the end, to which they move evenly; None keeps them.
            slots: Of the phase, over which they move.

        Raises:
            UserError: if a share is positive but below `SMALLEST_SHARE` of the sum.
        """
        for mixture in (shares, final or {}):
            total = sum(mixture.values())
            for name, share in mixture.items():
                if 0 < share < SMALLEST_SHARE * total:
                    raise UserError(
                        f"the share of source {name!r} in the mixture is {share / total:.1e}, "
                        f"below {SMALLEST_SHARE:.0e}: raise it, or set it to 0 to leave the "
                        "source out"
                    )
        self._keys = keys
        self._table: npt.NDArray[np.int64] | None = None
        if final is not None:
            self._settle(shares, final, slots)
            return
        # str() first: 0.1 shall mean one tenth, not the double next to it.
        exact = {name: Fraction(str(share)) for name, share in shares.items() if share > 0}
        if not exact:
            raise UserError("the shares of the mixture sum to zero: give at least one source some")
        scale = lcm(*(fraction.denominator for fraction in exact.values()))
        weights = [int(fraction * scale) for fraction in exact.values()]
        self.sources = tuple(exact)
        self._bounds = [sum(weights[:j]) for j in range(len(weights) + 1)]
        self.block = max(SMALLEST_BLOCK, -(-self._bounds[-1] // min(weights)))
        self._latest = (0, self._layout(0))  # steps come in order: one block is kept

    def _settle(self, shares: Mapping[str, float], final: Mapping[str, float], slots: int) -> None:
        """Counts of all blocks, one after another."""
        names = [n for n in {**shares, **final} if shares.get(n, 0) > 0 or final.get(n, 0) > 0]
        self.sources = tuple(names)
        self.block = max(SMALLEST_BLOCK, -(-slots // CURRICULUM_BLOCKS))
        blocks = -(-slots // self.block)
        ends = [np.array([end.get(n, 0.0) for n in names], np.float64) for end in (shares, final)]
        first, last = (end / end.sum() for end in ends)
        moved = (np.arange(blocks)[:, None] + 0.5) * self.block / slots  # in the block's middle
        wanted = (first + (last - first) * np.minimum(moved, 1)) * self.block
        self._table = np.zeros((blocks + 1, len(names)), np.int64)
        due = np.zeros(len(names))
        for block in range(blocks):
            due += wanted[block]
            lack = np.maximum(due - self._table[block], 0)
            counts = np.floor(lack).astype(np.int64)
            missing = self.block - int(counts.sum())
            # Sums of parts that were cut at zero may ask for a slot too many: from the largest.
            order = np.argsort(counts - lack if missing >= 0 else -lack, kind="stable")
            for j in order[: abs(missing)]:
                counts[j] += 1 if missing > 0 else -1
            self._table[block + 1] = self._table[block] + counts
        self._latest = (0, self._layout(0))

    def _owned(self, blocks: int) -> list[int]:
        """Slots of each source in the first `blocks` blocks."""
        if self._table is not None:
            found: list[int] = self._table[blocks].tolist()
            return found
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
