"""What Newton-Schulz computes, the slow and exact way."""

import torch

from openzaya.optim.newton_schulz import COEFFICIENTS


def polynomial_of_singular_values(matrices, steps):
    """The quintic applied to the singular values of an fp64 decomposition."""
    a, b, c = COEFFICIENTS
    u, s, vh = torch.linalg.svd(matrices.double(), full_matrices=False)
    s = s / s.square().sum(-1, keepdim=True).sqrt()
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag_embed(s) @ vh
