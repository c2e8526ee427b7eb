"""Closed forms against the model itself: its parameters, its state, its optimizers' split."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from openzaya.model.accounting import Account, account, decode_flops, forward_flops, state_bytes
from openzaya.model.config import PRESETS, ModelConfig
from openzaya.model.model import Zaya
from openzaya.model.precision import cast_for_inference
from openzaya.model.state import SequenceState
from openzaya.optim.groups import parameter_groups

TINY = PRESETS["tiny"]
ABLATIONS: list[dict[str, Any]] = [
    {"attention": "standard"},
    {"router": "linear"},
    {"residual": "plain"},
    {"skip_expert": "none"},
    {"skip_expert": "identity"},
    {"tie_word_embeddings": False},
    {"cca_time0": 3, "cca_time1": 4},
    {"attention": "standard", "router": "linear", "residual": "plain", "skip_expert": "none"},
    {"layer_types": ("hybrid_sliding", "hybrid"), "sliding_window": 9},
]
CONFIGS = {
    **PRESETS,
    **{str(changes): TINY.model_copy(update=changes) for changes in ABLATIONS},
}


def meta_model(config: ModelConfig) -> Zaya:
    with torch.device("meta"):
        return Zaya(config)


def part_of(name: str) -> str:
    if "embed_tokens" in name or "lm_head" in name:
        return "embeddings"
    if ".experts." in name:
        return "experts"
    if ".gate." in name:
        return "router"
    if ".conv_qk_" in name:
        return "convolutions"
    return "attention" if ".self_attn." in name else "norms"


@pytest.mark.parametrize("name", CONFIGS)
def test_closed_form_equals_the_model(name: str) -> None:
    config = CONFIGS[name]
    model = meta_model(config)
    counted = account(config).parameters
    sizes = {key: value.numel() for key, value in model.named_parameters()}
    assert counted.total == sum(sizes.values())
    parts = ("attention", "convolutions", "router", "experts", "norms", "embeddings")
    for part in parts:
        expected = sum(size for key, size in sizes.items() if part_of(key) == part)
        assert getattr(counted, part) == expected, part
    assert sum(getattr(counted, part) for part in parts) == counted.total
    assert counted.active_experts * config.num_experts == counted.experts
    assert counted.total - counted.active == counted.experts - counted.active_experts
    groups = parameter_groups(model)
    assert counted.matrices == sum(sizes[key] for key in (*groups.hidden, *groups.gate_up))


@pytest.mark.parametrize("name", CONFIGS)
def test_serving_weights_equal_the_cast_model(name: str) -> None:
    model = meta_model(CONFIGS[name])
    cast_for_inference(model, torch.bfloat16)
    expected = sum(p.numel() * p.element_size() for p in model.parameters())
    assert account(CONFIGS[name]).serving.weights == expected


def billions(value: int, digits: int) -> str:
    return f"{value / 1e9:.{digits}f}"


def test_published_counts() -> None:
    small = account(PRESETS["zaya1-8b"]).parameters
    assert billions(small.total, 3) == "8.840"
    assert billions(small.total_without_embeddings, 3) == "8.303"
    assert billions(small.active, 2) == "1.29"
    assert billions(small.active_without_embeddings, 3) == "0.754"
    layers = PRESETS["zaya1-8b"].num_hidden_layers
    assert f"{(small.attention + small.convolutions) / layers / 1e6:.3f}" == "5.576"
    assert f"{small.convolutions / layers / 1e6:.3f}" == "0.333"
    assert f"{small.router / layers / 1e6:.3f}" == "0.661"
    assert f"{small.active_experts / layers / 1e6:.3f}" == "12.583"
    large = account(PRESETS["zaya1-74b"]).parameters
    assert billions(large.total, 2) == "74.79"
    assert billions(large.active_without_embeddings, 2) == "4.26"


def test_state_of_zaya1_8b() -> None:
    state = account(PRESETS["zaya1-8b"]).state
    assert state.kv_per_token == 40_960
    assert state.mha_kv_per_token == 327_680
    assert state.compression == 8


@pytest.mark.parametrize("name", ["small", *(str(a) for a in ABLATIONS)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_bytes_equal_a_real_state(name: str, dtype: torch.dtype) -> None:
    config, batch, capacity = CONFIGS[name], 3, 24
    state = SequenceState(config, batch, capacity, dtype)
    counted = state_bytes(config, capacity, dtype.itemsize)
    assert state.kv_nbytes == batch * counted.kv_at_context
    assert state.nbytes == batch * counted.per_sequence
    assert state.nbytes - state.kv_nbytes == batch * counted.fixed_per_sequence
    below_window = SequenceState(config, 1, 8, dtype)
    assert below_window.kv_nbytes / below_window.capacity == counted.kv_per_token


def test_flops_by_counting_products_of_the_model() -> None:
    """FLOPs of everything but scores and convolutions, as torch counts them in a real forward."""
    from torch.utils.flop_counter import FlopCounterMode

    config = TINY.model_copy(update={"skip_expert": "none", "attention": "standard"})
    from openzaya.model.init import init_weights

    model = Zaya(config).eval()
    init_weights(model, 0)
    tokens = torch.randint(0, config.vocab_size, (2, 8))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.logits(model(tokens).hidden)
    by_op = counter.get_flop_counts()["Global"]
    products = sum(v for op, v in by_op.items() if "attention" not in str(op))
    counted = forward_flops(config, 8)
    assert products == (counted.total - counted.scores) * tokens.numel()


def test_scores_by_listing_what_every_token_sees() -> None:
    config = TINY.model_copy(
        update={"layer_types": ("hybrid_sliding", "hybrid"), "sliding_window": 5}
    )
    for context in (1, 4, 5, 6, 23):
        pairs = sum(min(i, 5) + i for i in range(1, context + 1))
        expected = 4 * config.query_width * pairs / context
        assert forward_flops(config, context).scores == pytest.approx(expected)
        last = 4 * config.query_width * (min(context, 5) + context)
        assert decode_flops(config, context).scores == last


def test_table_two_of_the_cca_paper() -> None:
    """The closed forms of the paper, for one layer at batch 1 in its own symbols."""
    config = PRESETS["zaya1-8b"].model_copy(update={"num_hidden_layers": 1})
    width, seq = config.hidden_size, 4096
    c1, c2 = width // config.query_width, width // config.key_width
    heads = config.num_attention_heads + config.num_key_value_heads
    latent = width / c1 + width / c2
    conv = latent * config.cca_time0 + latent**2 / heads * config.cca_time1
    counted = account(config, seq)
    biases, temperatures = 2 * latent, config.num_key_value_heads
    paper = 2 * width**2 / c1 + 2 * width**2 / c2 + conv
    counted_attention = counted.parameters.attention + counted.parameters.convolutions
    assert counted_attention - biases - temperatures == paper
    assert counted.state.kv_at_context == 2 * 2 * seq * width / c2
    linear = (1 / c1 + 1 / c2) * 4 * width**2
    assert counted.forward.attention == linear == counted.decode.attention
    assert counted.forward.convolutions == 2 * conv
    assert counted.decode.scores == 4 * width * seq / c1
    assert counted.forward.scores == counted.decode.scores * (seq + 1) / (2 * seq)


def test_memory_and_json() -> None:
    counted = account(PRESETS["small"], context=100, batch=4)
    p, training = counted.parameters, counted.training
    rest = p.total - p.matrices
    assert training.total == 4 * (p.total + p.total + p.matrices + 2 * rest)
    assert counted.training_flops == 3 * counted.forward.total
    assert counted.serving.state == 4 * counted.state.per_sequence
    assert json.loads(json.dumps(counted.to_json()))["parameters"]["total"] == p.total
    assert isinstance(counted, Account)
