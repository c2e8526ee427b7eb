"""Numbers out of keys: a 64-bit hash and a small generator seeded by it.

The same keys give the same numbers on every machine and Python version, so whatever is drawn here
can be drawn again for any step, without drawing what came before.
"""

from __future__ import annotations

import hashlib
from collections.abc import MutableSequence, Sequence
from typing import Any, TypeVar

MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_T = TypeVar("_T")


def mix64(x: Any) -> Any:
    """The finaliser of SplitMix64: a bijection of 64-bit integers that scatters all bits.

    Args:
        x: A Python int, or an array of uint64 (any shape, which the result keeps).

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
    """
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def text_hash(text: str | bytes) -> int:
    """64 bits of BLAKE2b over the text."""
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def hash64(*keys: int | str) -> int:
    """One 64-bit number out of any sequence of integers and strings; the order matters."""
    state = len(keys)
    for key in keys:
        value = text_hash(key) if isinstance(key, str) else key & MASK64
        state = mix64((state * 3 + _GOLDEN + value) & MASK64)
    return int(state)


class Rng:
    """SplitMix64, seeded by keys. Cheap to make, so one is made per drawn object."""

    def __init__(self, *keys: int | str) -> None:
        self._state = hash64(*keys)

    def below(self, n: int) -> int:
        """A number of range(n), n far below 2**64 (the bias is below n / 2**64)."""
        self._state = (self._state + _GOLDEN) & MASK64
        return int((mix64(self._state) * n) >> 64)

    def between(self, low: int, high: int) -> int:
        """A number from low to high, both included."""
        return low + self.below(high - low + 1)

    def choice(self, items: Sequence[_T]) -> _T:
        """One of the items."""
        return items[self.below(len(items))]

    def shuffle(self, items: MutableSequence[Any]) -> None:
        """Fisher-Yates, in place."""
        for i in range(len(items) - 1, 0, -1):
            j = self.below(i + 1)
            items[i], items[j] = items[j], items[i]
