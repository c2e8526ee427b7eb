import pytest
import torch

from openzaya.optim.muon import Muon


def run(parameters, gradients, **settings):
    optimizer = Muon(parameters, dtype=torch.float32, **settings)
    for step in gradients:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = step[id(p)].clone() if id(p) in step else None
        optimizer.step()


@pytest.mark.parametrize("nesterov", [True, False])
def test_agrees_with_torch_on_plain_matrices(nesterov):
    """Oracle: torch.optim.Muon, whose Newton-Schulz products are bf16."""
    torch.manual_seed(0)
    start = torch.randn(24, 40)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    settings = {"lr": 1e-2, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.1}
    a = Muon([{"params": [ours]}], **settings)
    b = torch.optim.Muon([theirs], adjust_lr_fn="match_rms_adamw", **settings)
    for _ in range(4):
        ours.grad = torch.randn(24, 40)
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


def test_update_has_the_rms_of_adamw():
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(64, 128))
    run([{"params": [p]}], [{id(p): torch.randn(64, 128)}], lr=1.0)
    assert 0.1 < p.detach().square().mean().sqrt() < 0.3


def test_a_missing_gradient_counts_as_zero():
    torch.manual_seed(0)
    start = torch.randn(4, 4)
    a, b = (torch.nn.Parameter(start.clone()) for _ in range(2))
    g = torch.randn(4, 4)
    run([{"params": [a]}], [{id(a): g}, {}])
    run([{"params": [b]}], [{id(b): g}, {id(b): torch.zeros(4, 4)}])
    assert torch.equal(a, b)


def test_vectors_are_refused():
    with pytest.raises(ValueError, match="matrices"):
        Muon([{"params": [torch.nn.Parameter(torch.zeros(3))]}])
    with pytest.raises(ValueError, match="divide by 2"):
        Muon([{"params": [torch.nn.Parameter(torch.zeros(3, 4))], "split": 2}])
