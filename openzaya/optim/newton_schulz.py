"""Approximate orthogonalisation of matrices by a Newton-Schulz iteration."""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Quintic x -> a x + b x^3 + c x^5 that drives singular values into about 0.7..1.2 in five steps
(Keller Jordan, "Muon", 2024)."""

SYMMETRIC_FROM = 768
"""Short side from which the upper triangle of symmetric products is left out. Below it, the
products of half the size lose more than they save."""


def newton_schulz(
    matrices: Tensor,
    steps: int = 5,
    dtype: torch.dtype = torch.bfloat16,
    symmetric_from: int = SYMMETRIC_FROM,
) -> Tensor:
    """Replace the singular values of each matrix by values near 1.

    Args:
        matrices: [batch, m, n], any float dtype.
        steps: iterations.
        dtype: dtype of the products; fp32 for exactness tests.
        symmetric_from: matrices with an even short side of at least this length go the short way
            through symmetric products, with the same result to rounding.

    Returns:
        [batch, m, n] in `dtype`. An all-zero matrix stays zero.
    """
    # The Frobenius norm bounds the largest singular value, so all of them start in [0, 1].
    norm = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    scale = norm.clamp_min(1e-30).reciprocal()
    x = torch.mul(matrices, scale, out=torch.empty_like(matrices, dtype=dtype))
    tall = x.shape[-2] > x.shape[-1]
    if tall:  # The products below are square in the first axis: keep it the short one.
        x = x.mT.contiguous()
    short = x.shape[-2]
    halve = short >= symmetric_from and short % 2 == 0
    x = _iterate_halves(x, steps) if halve else _iterate(x, steps)
    return x.mT if tall else x


# Both forms below hand a transposed matrix only to the right of a product where they can: on the
# left it costs a third of the speed (oneDNN, bf16).


def _iterate(x: Tensor, steps: int) -> Tensor:
    """Steps on [batch, m, n], m <= n, which is overwritten: S = X X^T; X <- a X + (b S + c S^2) X.

    Returns:
        [batch, m, n].
    """
    a, b, c = COEFFICIENTS
    y = torch.empty_like(x)
    gram = x.new_empty(*x.shape[:2], x.shape[1])
    poly = torch.empty_like(gram)
    for _ in range(steps):
        torch.bmm(x, x.mT, out=gram)
        torch.baddbmm(gram, gram, gram.mT, beta=b, alpha=c, out=poly)
        torch.baddbmm(x, poly, x, beta=a, out=y)
        x, y = y, x
    return x


def _iterate_halves(x: Tensor, steps: int) -> Tensor:
    """The same with X cut into an upper and a lower half of rows.

    S and its polynomial are symmetric, [[D0, L^T], [L, D1]]: three of their four blocks are
    computed. Both diagonal blocks are one batch.

    Returns:
        [batch, m, n].
    """
    a, b, c = COEFFICIENTS
    batch, rows, columns = x.shape
    half = rows // 2
    x = torch.stack(x.view(batch, 2, half, columns).unbind(1))
    y = torch.empty_like(x)
    diagonal = x.new_empty(2, batch, half, half)
    lower = x.new_empty(batch, half, half)
    poly_diagonal, poly_lower = torch.empty_like(diagonal), torch.empty_like(lower)
    d, pd = diagonal.flatten(0, 1), poly_diagonal.flatten(0, 1)
    for _ in range(steps):
        halves = x.flatten(0, 1)
        torch.bmm(halves, halves.mT, out=d)
        torch.bmm(x[1], x[0].mT, out=lower)

        torch.baddbmm(d, d, d.mT, beta=b, alpha=c, out=pd)
        poly_diagonal[0].baddbmm_(lower.mT, lower, alpha=c)
        poly_diagonal[1].baddbmm_(lower, lower.mT, alpha=c)
        torch.baddbmm(lower, lower, diagonal[0].mT, beta=b, alpha=c, out=poly_lower)
        poly_lower.baddbmm_(diagonal[1], lower, alpha=c)

        torch.baddbmm(halves, pd, halves, beta=a, out=y.flatten(0, 1))
        y[0].baddbmm_(poly_lower.mT, x[1])
        y[1].baddbmm_(poly_lower, x[0])
        x, y = y, x
    return x.transpose(0, 1).reshape(batch, rows, columns)
