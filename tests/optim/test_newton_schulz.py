import pytest
import torch

from openzaya.optim.newton_schulz import newton_schulz
from tests.optim.oracle import polynomial_of_singular_values

HALVES, WHOLE = 2, 10**9  # `symmetric_from` that takes every even matrix, and none


def relative_error(result, expected):
    return float((result.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("symmetric_from", [HALVES, WHOLE])
@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 8, 32), (2, 32, 8), (2, 7, 12), (1, 130, 64)])
@pytest.mark.parametrize("steps", [1, 5])
def test_equals_the_polynomial_of_singular_values(shape, steps, symmetric_from):
    torch.manual_seed(0)
    matrices = torch.randn(shape) * 3
    result = newton_schulz(matrices, steps, torch.float32, symmetric_from)
    assert result.shape == matrices.shape
    assert relative_error(result, polynomial_of_singular_values(matrices, steps)) < 1e-5


@pytest.mark.parametrize("spectrum", ["flat", "decaying"])
@pytest.mark.parametrize("symmetric_from", [HALVES, WHOLE])
def test_bfloat16_is_the_same_to_rounding(symmetric_from, spectrum):
    torch.manual_seed(0)
    matrices = torch.randn(2, 96, 128)
    if spectrum == "decaying":
        matrices = matrices * torch.logspace(0, -2, 128)
    result = newton_schulz(matrices, 5, torch.bfloat16, symmetric_from)
    assert result.dtype == torch.bfloat16
    assert relative_error(result, polynomial_of_singular_values(matrices, 5)) < 0.025


def test_singular_values_come_near_one():
    torch.manual_seed(0)
    values = torch.linalg.svdvals(newton_schulz(torch.randn(3, 64, 96), 5, torch.float32))
    assert 0.6 < values.min() < values.max() < 1.25


@pytest.mark.parametrize("symmetric_from", [HALVES, WHOLE])
def test_each_matrix_of_a_batch_is_treated_alone(symmetric_from):
    torch.manual_seed(0)
    matrices = torch.randn(4, 12, 20) * torch.tensor([1e-6, 1.0, 1e3, 5.0])[:, None, None]
    together = newton_schulz(matrices, 5, torch.float32, symmetric_from)
    for i in range(4):
        alone = newton_schulz(matrices[i : i + 1], 5, torch.float32, symmetric_from)[0]
        torch.testing.assert_close(together[i], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("symmetric_from", [HALVES, WHOLE])
@pytest.mark.parametrize("shape", [(2, 4, 6), (2, 6, 4)])
def test_what_comes_in_stays_and_zero_stays_zero(symmetric_from, shape):
    matrices = torch.randn(shape)
    before = matrices.clone()
    newton_schulz(matrices, 5, torch.float32, symmetric_from)
    assert torch.equal(matrices, before)
    assert not newton_schulz(torch.zeros(shape), symmetric_from=symmetric_from).any()
