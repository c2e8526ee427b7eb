import pytest
import torch

from openzaya.optim import muon
from openzaya.optim.muon import Muon
from tests.optim.oracle import polynomial_of_singular_values


def run(parameters, gradients, **settings):
    """Steps of Muon; parameters are looked up in each step's gradients by identity."""
    optimizer = Muon(parameters, **{"dtype": torch.float32, **settings})
    for step in gradients:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = step[id(p)].clone() if id(p) in step else None
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_agrees_with_torch_on_plain_matrices(nesterov, momentum, shape):
    """Oracle: torch.optim.Muon, whose Newton-Schulz products are bf16."""
    torch.manual_seed(0)
    start = torch.randn(shape)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    settings = {"lr": 1e-2, "momentum": momentum, "nesterov": nesterov, "weight_decay": 0.1}
    a = Muon([{"params": [ours]}], **settings)
    b = torch.optim.Muon([theirs], adjust_lr_fn="match_rms_adamw", **settings)
    for _ in range(4):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        a.step()
        b.step()
    moved = (theirs - start).abs().mean()
    assert (ours - theirs).abs().mean() < 0.02 * moved


def test_a_stack_is_updated_matrix_by_matrix():
    torch.manual_seed(0)
    start = torch.randn(3, 8, 12)
    stack = torch.nn.Parameter(start.clone())
    single = [torch.nn.Parameter(m.clone()) for m in start]
    steps = [torch.randn(3, 8, 12) for _ in range(3)]
    run([{"params": [stack]}], [{id(stack): g} for g in steps])
    run(
        [{"params": single}],
        [{id(p): g[i] for i, p in enumerate(single)} for g in steps],
    )
    torch.testing.assert_close(stack.detach(), torch.stack([p.detach() for p in single]))


def test_split_cuts_rows_into_separate_matrices():
    torch.manual_seed(0)
    start = torch.randn(2, 16, 12)  # two experts, gate rows then up rows
    whole = torch.nn.Parameter(start.clone())
    halves = [torch.nn.Parameter(m.clone()) for expert in start for m in expert.chunk(2)]
    gradient = torch.randn(2, 16, 12)
    parts = [m for expert in gradient for m in expert.chunk(2)]
    run([{"params": [whole], "split": 2}], [{id(whole): gradient}])
    run([{"params": halves}], [{id(p): g for p, g in zip(halves, parts, strict=True)}])
    expected = torch.cat([p.detach() for p in halves]).view(2, 16, 12)
    torch.testing.assert_close(whole.detach(), expected)
    assert not torch.allclose(whole.detach(), start - 1e-3 * torch.sign(gradient)), (
        "the update is not a sign update"
    )


@pytest.mark.parametrize("split", [1, 2])
def test_it_does_not_matter_how_matrices_are_stacked(monkeypatch, split):
    """Five matrices of one parameter, one of another, in stacks of 1, 2, 3, 4 and all."""
    torch.manual_seed(0)
    start, gradients = torch.randn(5, 8, 6), torch.randn(2, 5, 8, 6)
    more, more_gradients = torch.randn(8, 6), torch.randn(2, 8, 6)
    results = []
    for limit in (1, 2, 3, 4, 100):
        monkeypatch.setitem(muon.STACK_ELEMENTS, "cpu", limit * (8 // split) * 6)
        a, b = (torch.nn.Parameter(t.clone()) for t in (start, more))
        steps = [{id(a): g, id(b): h} for g, h in zip(gradients, more_gradients, strict=True)]
        run([{"params": [a, b], "split": split}], steps, weight_decay=0.1)
        results.append(torch.cat([a.detach(), b.detach()[None]]))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(64, 128), (128, 64), (96, 96), (4, 64, 64)])
def test_update_has_the_rms_of_adamw(shape):
    """Orthogonal m x n has RMS 1 / sqrt(max(m, n)); the iteration comes near orthogonal."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(shape))
    run([{"params": [p]}], [{id(p): torch.randn(shape)}], lr=1.0)
    assert p.detach().square().mean().sqrt() == pytest.approx(0.2, rel=0.15)


def test_two_steps_from_the_definition():
    """Oracle: the formulas in fp64, with the polynomial of an exact decomposition."""
    torch.manual_seed(0)
    start, first, second = torch.randn(3, 2, 10, 14).double()
    p = torch.nn.Parameter(start.float())
    gradients = [{id(p): first.float()}, {id(p): second.float()}]
    run([{"params": [p]}], gradients, lr=0.1, momentum=0.9, weight_decay=0.2)
    expected, mean = start, torch.zeros_like(start)
    for gradient in (first, second):
        mean = 0.9 * mean + 0.1 * gradient
        direction = polynomial_of_singular_values(0.1 * gradient + 0.9 * mean, 5)
        expected = (1 - 0.1 * 0.2) * expected - 0.1 * 0.2 * 14**0.5 * direction
    torch.testing.assert_close(p.detach(), expected.float(), rtol=1e-5, atol=1e-5)


def test_weight_decay_is_decoupled():
    torch.manual_seed(0)
    start, gradient = torch.randn(2, 8, 8)
    with_decay, without = (torch.nn.Parameter(start.clone()) for _ in range(2))
    for p, decay in ((with_decay, 0.5), (without, 0.0)):
        run([{"params": [p]}], [{id(p): gradient}], lr=0.1, weight_decay=decay)
    torch.testing.assert_close(without - with_decay, 0.1 * 0.5 * start)


def test_a_missing_gradient_counts_as_zero():
    torch.manual_seed(0)
    start = torch.randn(4, 4)
    a, b = (torch.nn.Parameter(start.clone()) for _ in range(2))
    g = torch.randn(4, 4)
    run([{"params": [a]}], [{id(a): g}, {}])
    run([{"params": [b]}], [{id(b): g}, {id(b): torch.zeros(4, 4)}])
    assert torch.equal(a, b)


@pytest.mark.parametrize("momentum", [0.0, 0.95])
def test_nothing_but_zero_gradients_moves_nothing_but_decay(momentum):
    start = torch.ones(2, 4, 4)
    p = torch.nn.Parameter(start.clone())
    zero = torch.zeros(2, 4, 4)
    run([{"params": [p]}], [{id(p): zero}, {}], lr=0.1, weight_decay=0.1, momentum=momentum)
    torch.testing.assert_close(p.detach(), start * 0.99**2)


def test_without_momentum_only_the_last_gradient_counts_and_no_buffer_is_kept():
    torch.manual_seed(0)
    start, first, last = torch.randn(3, 6, 6)
    p = torch.nn.Parameter(start.clone())
    optimizer = run([{"params": [p]}], [{id(p): first}], momentum=0.0, lr=0.1)
    assert not optimizer.state[p]
    between = p.detach().clone()
    p.grad = last
    optimizer.step()
    fresh = torch.nn.Parameter(torch.zeros(6, 6))
    run([{"params": [fresh]}], [{id(fresh): last}], lr=0.1, momentum=0.95)
    torch.testing.assert_close(p.detach() - between, fresh.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("nesterov", [True, False])
def test_bfloat16_parameters_follow_fp32_ones(nesterov):
    """Momentum stays fp32 and is not normalised (torch 2.13's is, without Nesterov)."""
    torch.manual_seed(0)
    start = torch.randn(3, 12, 16).bfloat16()
    low, high = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.float())
    steps = [torch.randn(3, 12, 16).bfloat16() for _ in range(3)]
    optimizers = [
        run([{"params": [p]}], [{id(p): g.to(p.dtype)} for g in steps], lr=0.1, nesterov=nesterov)
        for p in (low, high)
    ]
    kept = [o.state[p]["momentum"] for o, p in zip(optimizers, (low, high), strict=True)]
    assert torch.equal(*kept)
    assert kept[0].dtype == torch.float32
    torch.testing.assert_close(low.detach().float(), high.detach(), rtol=0.01, atol=0.01)


def test_momentum_in_bfloat16_is_that_in_fp32_to_rounding():
    torch.manual_seed(0)
    start, signal = torch.randn(2, 24, 24)
    steps = [signal + torch.randn(24, 24) for _ in range(60)]
    ends, kept = [], []
    for dtype in (torch.float32, torch.bfloat16):
        p = torch.nn.Parameter(start.clone())
        optimizer = run([{"params": [p]}], [{id(p): g} for g in steps], momentum_dtype=dtype)
        kept.append(optimizer.state[p]["momentum"])
        ends.append(p.detach())
    assert kept[1].dtype == torch.bfloat16
    assert (kept[1] - kept[0]).norm() < 0.01 * kept[0].norm()
    assert (ends[1] - ends[0]).norm() < 0.01 * (ends[0] - start).norm()


def test_what_it_cannot_take_is_refused():
    with pytest.raises(ValueError, match="matrices"):
        Muon([{"params": [torch.nn.Parameter(torch.zeros(3))]}])
    with pytest.raises(ValueError, match="divide by 2"):
        Muon([{"params": [torch.nn.Parameter(torch.zeros(3, 4))], "split": 2}])
    with pytest.raises(ValueError, match=r"at most 0\.98"):
        Muon(
            [{"params": [torch.nn.Parameter(torch.zeros(3, 4))]}],
            momentum=0.99,
            momentum_dtype=torch.bfloat16,
        )
