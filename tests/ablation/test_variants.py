"""The oracle of a count is the model itself: its tensors, counted."""

import pytest

from openzaya.ablation.variants import BASELINE, FULL, TOLERANCE, VARIANTS, matched, mismatch, sized
from openzaya.config.load import load_recipe
from openzaya.errors import UserError
from openzaya.model.config import PRESETS
from openzaya.model.model import Zaya

EXPERTS = ("gate_up_proj", "down_proj")


@pytest.fixture(scope="module")
def base():
    return load_recipe("ablate").model


def counted(config):
    """Total and active parameters of a real model, without embeddings."""
    model = Zaya(config)
    total = active = 0
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name:
            continue
        total += parameter.numel()
        expert = ".experts." in name and name.endswith(EXPERTS)
        active += parameter.numel() // (config.num_experts if expert else 1)
    return total, active


@pytest.mark.parametrize("size", [96, 128, 160])
def test_real_models_of_a_size_have_equal_parameters(base, size):
    standard = sized(base, size)
    total, active = counted(standard)
    for variant, kinds in VARIANTS.items():
        config = matched(standard, variant)
        for field, kind in kinds.items():
            assert getattr(config, field) == kind
        ours = counted(config)
        assert ours[0] == pytest.approx(total, rel=TOLERANCE)
        assert ours[1] == pytest.approx(active, rel=TOLERANCE)
        assert mismatch(config, standard) == pytest.approx(
            (ours[0] / total - 1, ours[1] / active - 1)
        )


@pytest.mark.parametrize("size", [112, 144, 192, 256, 384])
def test_other_sizes_match_too(base, size):
    standard = sized(base, size)
    for variant in VARIANTS:
        assert max(map(abs, mismatch(matched(standard, variant), standard))) <= TOLERANCE


def test_only_widths_of_heads_and_router_are_adjusted(base):
    standard = sized(base, 128)
    free = {"head_dim", "router_hidden_size", *VARIANTS[BASELINE]}
    for variant in VARIANTS:
        changed = {
            name
            for name, value in matched(standard, variant).model_dump().items()
            if value != standard.model_dump()[name]
        }
        assert changed <= free
    assert matched(standard, BASELINE) == standard
    assert matched(standard, FULL).head_dim < standard.head_dim, "the parts must be paid for"


def test_a_size_has_the_shape_of_the_recipe(base):
    twice = sized(base, 2 * base.hidden_size)
    assert twice.num_hidden_layers == 2 * base.num_hidden_layers
    assert twice.moe_intermediate_size == 2 * base.moe_intermediate_size
    assert twice.router_hidden_size == 2 * base.router_hidden_size
    assert abs(twice.head_dim - 2 * base.head_dim) <= base.head_dim / 2


def test_any_model_may_be_the_base():
    """A recipe of the full architecture stands for the standard MoE of its shape."""
    standard = sized(PRESETS["zaya1-8b"], 1024)
    assert {name: getattr(standard, name) for name in VARIANTS[BASELINE]} == VARIANTS[BASELINE]
    assert max(map(abs, mismatch(matched(standard, FULL), standard))) <= TOLERANCE


def test_what_cannot_be_matched_is_refused(base):
    with pytest.raises(UserError, match="size 8: no head width"):
        sized(base, 8)
    thin = base.model_copy(update={"moe_intermediate_size": 16, "head_dim": 4})
    with pytest.raises(UserError, match="cannot be matched"):
        matched(thin, "residual")
