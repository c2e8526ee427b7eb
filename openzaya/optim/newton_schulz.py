"""Approximate orthogonalisation of matrices by a Newton-Schulz iteration."""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Quintic x -> a x + b x^3 + c x^5 that drives singular values into about 0.7..1.2 in five steps
(Keller Jordan, "Muon", 2024)."""


def newton_schulz(matrices: Tensor, steps: int = 5, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Replace the singular values of each matrix by values near 1.

    Args:
        matrices: [batch, m, n], any float dtype.
        steps: iterations.
        dtype: dtype of the products; fp32 for exactness tests.

    Returns:
        [batch, m, n] in `dtype`. An all-zero matrix stays zero.
    """
    a, b, c = COEFFICIENTS
    # The Frobenius norm bounds the largest singular value, so all of them start in [0, 1].
    norm = torch.linalg.vector_norm(matrices.float(), dim=(-2, -1), keepdim=True)
    x = (matrices * norm.clamp_min(1e-30).reciprocal()).to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    if tall:  # the products below are square in the first axis: keep it the short one
        x = x.mT
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
