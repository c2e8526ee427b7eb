import pytest
import torch

from openzaya.config.recipe import BalanceConfig
from openzaya.model.config import PRESETS
from openzaya.model.model import Zaya
from openzaya.optim.balance import BalancingController, load_entropy


def controller(**settings):
    model = Zaya(PRESETS["tiny"])
    return model, BalancingController(model, BalanceConfig(**settings))


def biases(model):
    return torch.stack([layer.mlp.gate.balancing_biases for layer in model.model.layers])


def test_first_step_is_adamw_on_share_minus_target():
    """Oracle: AdamW's first step is lr * sign(gradient)."""
    model, control = controller()
    control.update(torch.tensor([[40, 20, 30, 10, 0], [25, 25, 25, 25, 0]]))
    after = biases(model)
    assert after[0, :4].tolist() == pytest.approx([-1e-3, 1e-3, -1e-3, 1e-3], rel=1e-3)
    assert after[1, :4].tolist() == [0, 0, 0, 0]
    assert after[:, 4].tolist() == [-1, -1]


def test_several_steps_equal_torch_adamw():
    model, control = controller(lr=1e-2)
    reference = torch.nn.Parameter(torch.zeros(2, 4))
    adamw = torch.optim.AdamW([reference], lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        load = torch.randint(1, 100, (2, 5), generator=generator)
        control.update(load)
        reference.grad = load[:, :4] / load.sum(1, keepdim=True) - 0.25
        adamw.step()
    torch.testing.assert_close(biases(model)[:, :4], reference.detach())


def test_skip_class_has_its_own_target():
    model, control = controller(skip_share=0.2)
    control.update(torch.tensor([[20, 20, 20, 20, 20], [25, 25, 25, 25, 0]]))
    after = biases(model)
    assert after[0].tolist() == pytest.approx([0, 0, 0, 0, -1], abs=1e-5)
    assert after[1].tolist() == pytest.approx([-1e-3] * 4 + [-1 + 1e-3], rel=1e-3)


def test_a_skip_bias_that_was_trained_is_held_too():
    model, control = controller()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.balancing_biases[-1] = 0.3
    control.restore()
    control.update(torch.tensor([[40, 20, 30, 10, 50], [25, 25, 25, 25, 9]]))
    assert biases(model)[:, -1].tolist() == pytest.approx([0.3, 0.3])


def test_switched_off_it_moves_nothing():
    model, control = controller(enabled=False)
    control.update(torch.tensor([[100, 0, 0, 0, 0], [100, 0, 0, 0, 0]]))
    assert not biases(model)[:, :4].any()


def test_it_balances_a_router_that_was_lopsided():
    """The loop closes: biased choices move the loads that move the biases."""
    torch.manual_seed(0)
    model, control = controller(lr=1e-2)
    logits = torch.randn(4000, 4) * 0.5 + torch.tensor([1.5, 0.0, -1.0, 0.5])
    probabilities = logits.softmax(-1)

    def load():
        chosen = (probabilities + biases(model)[0, :4]).argmax(-1)
        return torch.bincount(chosen, minlength=5)

    before = load_entropy(load()[None], 4)
    for _ in range(300):
        control.update(torch.stack([load(), load()]))
    assert before < 0.75
    assert load_entropy(load()[None], 4) > 0.99


def test_load_entropy_knows_even_collapsed_and_half():
    load = torch.tensor([[5, 5, 5, 5, 90], [20, 0, 0, 0, 0], [10, 10, 0, 0, 7]])
    assert load_entropy(load, 4).tolist() == pytest.approx([1.0, 0.0, 0.5], abs=1e-6)
