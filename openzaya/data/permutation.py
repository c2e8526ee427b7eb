"""Pseudo-random permutations of range(n) that are computed, not stored.

A Feistel network is a bijection on numbers of 2h bits whatever its round function is. For other n,
take the smallest such domain that holds n (at most four times as large) and apply the network
again while the result lies outside range(n) ("cycle walking"): still a bijection, a few steps long.
Source: Black and Rogaway, "Ciphers with arbitrary finite domains" (2002).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from openzaya.data.rng import hash64, mix64

_ROUNDS = 6


def _feistel(x: Any, half: int, keys: list[int]) -> Any:
    """One pass over numbers of 2 * half bits; `x` is an int or an array of uint64."""
    mask = (1 << half) - 1
    left, right = x >> half, x & mask
    for key in keys:
        left, right = right, left ^ (mix64(right ^ key) & mask)
    return (left << half) | right


def _half_bits(n: int) -> int:
    return max(1, ((n - 1).bit_length() + 1) // 2)


def _round_keys(keys: tuple[int | str, ...]) -> list[int]:
    name = hash64("permutation", *keys)
    return [hash64(name, i) for i in range(_ROUNDS)]


def permute(index: int, n: int, *keys: int | str) -> int:
    """Where `index` goes in the permutation of range(n) that `keys` name.

    Raises:
        IndexError: if `index` lies outside range(n).
    """
    if not 0 <= index < n:
        raise IndexError(f"index {index} is outside range({n})")
    half, round_keys = _half_bits(n), _round_keys(keys)
    x = _feistel(index, half, round_keys)
    while x >= n:
        x = _feistel(x, half, round_keys)
    return int(x)


def permutation(n: int, *keys: int | str) -> npt.NDArray[np.int64]:
    """All of it at once: element i is permute(i, n, *keys), shape [n]."""
    half, round_keys = _half_bits(n), _round_keys(keys)
    x = _feistel(np.arange(n, dtype=np.uint64), half, round_keys)
    outside = np.flatnonzero(x >= n)
    while outside.size:
        x[outside] = _feistel(x[outside], half, round_keys)
        outside = outside[x[outside] >= n]
    return x.astype(np.int64)
