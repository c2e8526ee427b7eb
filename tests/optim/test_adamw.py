import pytest
import torch

from openzaya.optim.adamw import BF16AdamW

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def train(optimizer, parameters, gradients):
    for step in gradients:
        for p, g in zip(parameters, step, strict=True):
            p.grad = None if g is None else g.clone()
        optimizer.step()


def test_it_follows_torch():
    """Oracle: torch.optim.AdamW with fp32 moments; each step's difference is bf16 rounding."""
    torch.manual_seed(0)
    starts = [torch.randn(30, 20), torch.randn(7), torch.randn(2, 3, 4)]
    signals = [torch.randn_like(s) for s in starts]
    gradients = [[0.3 * s + torch.randn_like(s) for s in signals] for _ in range(50)]
    ours, theirs = ([torch.nn.Parameter(s.clone()) for s in starts] for _ in range(2))
    a, b = BF16AdamW(ours, **SETTINGS), torch.optim.AdamW(theirs, **SETTINGS)
    train(a, ours, gradients)
    train(b, theirs, gradients)
    for p, q, start in zip(ours, theirs, starts, strict=True):
        assert (p - q).norm() < 0.01 * (q - start).norm()
        assert a.state[p].keys() == b.state[q].keys()
        for key in ("exp_avg", "exp_avg_sq"):
            kept, exact = a.state[p][key], b.state[q][key]
            assert kept.dtype == torch.bfloat16
            assert (kept - exact).norm() < 0.02 * exact.norm()


def test_the_first_step_is_exact():
    """Moments are rounded when they are kept, not before they are used."""
    torch.manual_seed(0)
    start, gradient = torch.randn(2, 2**20 + 3)  # more than one piece
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    train(BF16AdamW([ours], **SETTINGS), [ours], [[gradient]])
    train(torch.optim.AdamW([theirs], **SETTINGS), [theirs], [[gradient]])
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_second_moments_are_unbiased_and_come_down():
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(20_000))
    optimizer = BF16AdamW([p], lr=0.0)
    exact = torch.zeros(20_000)
    for _ in range(200):
        p.grad = torch.randn(20_000)
        exact.lerp_(p.grad.square(), 0.05)
        optimizer.step()
    kept = optimizer.state[p]["exp_avg_sq"]
    ratio = kept.float() / exact
    assert ratio.mean() == pytest.approx(1, abs=5e-4)
    assert ratio.std() < 0.01
    p.grad = torch.zeros_like(p)
    before = kept.float()
    for _ in range(40):
        optimizer.step()
    assert (kept.float() / before).mean() == pytest.approx(0.95**40, rel=0.01)


def test_a_parameter_without_gradient_stays():
    p, q = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = BF16AdamW([p, q], **SETTINGS)
    train(optimizer, [p, q], [[None, torch.ones(3)]])
    assert torch.equal(p.detach(), torch.ones(3))
    assert not torch.equal(q.detach(), torch.ones(3))
    assert not optimizer.state[p]


def test_a_decay_that_bfloat16_cannot_hold_is_refused():
    with pytest.raises(ValueError, match=r"at most 0\.98"):
        BF16AdamW([torch.nn.Parameter(torch.ones(3))], betas=(0.9, 0.999))
