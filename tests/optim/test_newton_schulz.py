import pytest
import torch

from openzaya.optim.newton_schulz import newton_schulz


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 8, 32), (2, 32, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_singular_values_come_near_one_and_vectors_stay(shape, dtype):
    """Oracle: the singular value decomposition."""
    torch.manual_seed(0)
    matrices = torch.randn(shape)
    result = newton_schulz(matrices, 5, dtype).float()
    assert result.shape == matrices.shape
    u, s, vh = torch.linalg.svd(matrices, full_matrices=False)
    # In the singular basis of the input the result is (nearly) diagonal, with values near 1.
    inner = u.mT @ result @ vh.mT
    diagonal = inner.diagonal(dim1=-2, dim2=-1)
    large = s > 0.1 * s.max()
    assert diagonal[large].min() > 0.5
    assert diagonal.max() < 1.4
    rest = inner - torch.diag_embed(diagonal)
    assert rest.abs().max() < (1e-4 if dtype == torch.float32 else 0.1)


def test_each_matrix_of_a_batch_is_treated_alone():
    torch.manual_seed(0)
    matrices = torch.randn(4, 12, 20) * torch.tensor([1e-6, 1.0, 1e3, 5.0])[:, None, None]
    together = newton_schulz(matrices, 5, torch.float32)
    for i in range(4):
        alone = newton_schulz(matrices[i : i + 1], 5, torch.float32)[0]
        torch.testing.assert_close(together[i], alone, rtol=1e-5, atol=1e-5)


def test_zero_stays_zero():
    assert not newton_schulz(torch.zeros(2, 4, 6)).any()
