"""What stays fp32 under bf16 compute, and what bf16 costs."""

from __future__ import annotations

import re

import pytest
import torch

from openzaya.model.block import Block
from openzaya.model.model import Zaya
from openzaya.model.precision import cast_for_inference
from openzaya.model.router import Routing
from tests.model.helpers import small_model, tokens_for
from tests.oracle import relative_error


@pytest.mark.parametrize("router", ["zaya", "linear"])
@torch.no_grad()
def test_router_is_fp32_under_bf16_compute(router):
    """Probabilities are fp32 numbers, not bf16 ones stored wide: biases move by 1e-3 a step."""
    model = small_model(5, torch.bfloat16, router=router)
    cast_for_inference(model, torch.bfloat16)
    for routing in model(tokens_for(model, 2, 9), with_routing=True).routing:
        p = routing.probabilities
        assert p.dtype == routing.weight.dtype == torch.float32
        assert routing.state is None or routing.state.dtype == torch.float32
        assert ((p.sum(-1) - 1).abs() < 1e-6).all()
        assert (p.bfloat16().float() != p).float().mean() > 0.5
    for block in model.model.layers:
        assert block.mlp.gate.balancing_biases.dtype == torch.float32
        assert all(p.dtype == torch.float32 for p in block.mlp.gate.parameters())


@pytest.mark.parametrize("residual", ["scaled", "plain"])
@pytest.mark.parametrize("cached", [False, True])
@torch.no_grad()
def test_residual_stream_is_fp32_under_bf16_compute(residual, cached):
    """Every block must take and give fp32 values that bf16 could not hold."""
    model = small_model(2, torch.bfloat16, residual=residual)
    cast_for_inference(model, torch.bfloat16)
    seen = 0

    def check(_, arguments, output):
        nonlocal seen
        for stream in (arguments[0], output[0]):
            assert stream.dtype == torch.float32
        assert (output[0].bfloat16().float() != output[0]).float().mean() > 0.5
        seen += 1

    for block in model.model.layers:
        assert isinstance(block, Block)
        block.register_forward_hook(check)
    state = model.new_state(2) if cached else None
    hidden = model(tokens_for(model, 2, 9), state=state).hidden
    assert seen == model.config.num_hidden_layers
    assert hidden.dtype == torch.bfloat16
    assert model.logits(hidden).dtype == torch.float32


@torch.no_grad()
def test_bf16_is_close_to_fp32_and_flips_few_tokens(record_property):
    """Oracle: the same weights in fp32.

    Drift is measured with the fp32 choices forced on the bf16 model, as one flip of an expert
    outweighs all rounding; flips are counted apart, and each must have been a close call.
    """
    exact = small_model(4)
    rounded = Zaya(exact.config, torch.bfloat16)
    rounded.load_state_dict(exact.state_dict())
    tokens = tokens_for(exact, 4, 32)
    reference = exact(tokens, with_routing=True)
    choices = iter(routing.chosen for routing in reference.routing)
    flipped, margins = [], []

    def force(gate, _, routing: Routing) -> Routing:
        index = next(choices)
        changed = routing.chosen != index
        biased = reference.routing[len(flipped)].probabilities + gate.balancing_biases
        top = biased.topk(2, dim=-1).values
        flipped.append(float(changed.float().mean()))
        margins.extend((top[..., 0] - top[..., 1])[changed].tolist())
        weight = routing.probabilities.gather(-1, index[..., None]).squeeze(-1)
        return Routing(index, weight, routing.probabilities, routing.state)

    for block in rounded.model.layers:
        block.mlp.gate.register_forward_hook(force)
    hidden = rounded(tokens).hidden
    drift = relative_error(rounded.logits(hidden), exact.logits(reference.hidden))
    record_property("bf16_drift", drift)
    record_property("bf16_flips_per_layer", flipped)
    record_property("bf16_largest_flipped_margin", max(margins, default=0.0))
    assert 1e-4 < drift < 3e-2
    assert len(flipped) == exact.config.num_hidden_layers
    assert max(flipped) < 0.1
    assert max(margins, default=0.0) < 0.05


def test_gradients_under_bf16_compute_are_fp32_and_close():
    """Oracle: fp32 compute. Weights are masters in fp32 and so are their gradients."""
    grads = []
    for dtype in (torch.float32, torch.bfloat16):
        # One class, so that no token can be routed elsewhere.
        model = small_model(4, dtype, num_experts=1, skip_expert="none")
        tokens = tokens_for(model, 4, 24)
        model.loss(model(tokens[:, :-1]).hidden, tokens[:, 1:]).backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    for name, exact in grads[0].items():
        rounded = grads[1][name]
        assert rounded.dtype == torch.float32
        if name.endswith("temp") or ".gate." in name:
            continue  # a cancelling sum; and one class has probability one, without gradient
        error = float((rounded - exact).norm() / exact.norm())
        assert error < 0.06, f"{name}: {error}"


def test_what_inference_stores_in_bf16():
    """Oracle: the list of matrices, written out; all else must stay fp32."""
    model = small_model(0, tie_word_embeddings=False)
    cast_for_inference(model, torch.bfloat16)
    cast = {
        re.sub(r"model\.layers\.\d+\.", "", name)
        for name, parameter in model.named_parameters()
        if parameter.dtype == torch.bfloat16
    }
    assert cast == {
        "model.embed_tokens.weight",
        "lm_head.weight",
        "self_attn.qkv_proj.q_proj.weight",
        "self_attn.qkv_proj.k_proj.weight",
        "self_attn.qkv_proj.v_proj_current.weight",
        "self_attn.qkv_proj.v_proj_delayed.weight",
        "self_attn.o_proj.weight",
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
    }
    kept = {p.dtype for p in model.parameters()} - {torch.bfloat16}
    assert kept == {torch.float32}
