"""What the tests of the C kernels share: random inputs, documents, and how errors are measured."""

from __future__ import annotations

import pytest
import torch

from openzaya.kernels.native.library import library

needs_kernels = pytest.mark.skipif(library() is None, reason="no C compiler here")

ROUNDING = 0.012
"""What bf16 inputs to products, and sums of them, may cost beside values of order one."""


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal numbers, the same for every dtype up to rounding."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf of the same values in double precision."""
    return tensor.detach().double().requires_grad_()


def check(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = ROUNDING) -> None:
    """Assert that the largest error is small beside the largest value, or beside one.

    The inputs are of order one, so gradients that cancel to nothing are held to that.
    """
    assert actual.shape == expected.shape
    assert bool(actual.isfinite().all())
    scale = max(float(expected.detach().abs().max()), 1.0)
    error = float((actual.detach().double() - expected.detach()).abs().max()) / scale
    assert error < tolerance, f"{error:.1e}, at most {tolerance:.1e}"


def positions(rows: list[list[int]]) -> torch.Tensor:
    """[batch, seq] int32 within the document, of rows that hold documents of these lengths."""
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows]).int()


def starts(rows: list[list[int]]) -> torch.Tensor:
    """[batch, seq] int32, where each token's document begins."""
    where = positions(rows)
    return torch.arange(where.shape[1], dtype=torch.int32) - where


PACKINGS = {
    "border-at-1": [[1, 129]],
    "border-at-63": [[63, 67]],
    "border-at-64": [[64, 66]],
    "border-at-65": [[65, 65]],
    "single-tokens": [[1] * 70],
    "some-single-tokens": [[1, 62, 1, 1, 63, 2]],
    "rows-differ": [[130], [65, 1, 64], [1, 1, 128]],
    "many": [[3, 5, 2, 7, 11, 1, 13] * 4],
}
"""Rows of packed documents, with borders around those of the kernels' blocks of 64 tokens."""
