"""The alternatives that a configuration can name, initial values, error messages."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from openzaya.model.attention import StandardAttention
from openzaya.model.config import PRESETS, ModelConfig
from openzaya.model.experts import MixtureOfExperts
from openzaya.model.init import init_weights
from openzaya.model.layout import build_layout
from openzaya.model.model import Zaya
from openzaya.model.residual import ResidualScaling
from openzaya.model.router import LinearRouter, ZayaRouter
from tests.model.helpers import TOLERANCE, plain_logits, small_config, small_model, tokens_for
from tests.oracle import randomise, relative_error

# Standard attention


def _turn(vector: torch.Tensor, position: int, rotary_dim: int, theta: float) -> torch.Tensor:
    """RoPE of one head's vector, a pair of channels at a time."""
    out = vector.clone()
    half = rotary_dim // 2
    for i in range(half):
        angle = position * theta ** (-2 * i / rotary_dim)
        a, b = float(vector[i]), float(vector[i + half])
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + half] = a * math.sin(angle) + b * math.cos(angle)
    return out


def _attention_by_hand(
    module: StandardAttention, x: torch.Tensor, config: ModelConfig, window: int | None
) -> torch.Tensor:
    """[seq, hidden] -> [seq, hidden], one query and one head after the other."""
    theta = config.theta(module.layer_type)
    q, k, v = (
        (x @ p.weight.T).view(len(x), -1, config.head_dim)
        for p in (module.q_proj, module.k_proj, module.v_proj)
    )
    out = torch.zeros(len(x), config.num_attention_heads, config.head_dim)
    for t in range(len(x)):
        for head in range(config.num_attention_heads):
            kv = head * config.num_key_value_heads // config.num_attention_heads
            seen = range(0 if window is None else max(0, t - window + 1), t + 1)
            query = _turn(q[t, head], t, config.rotary_dim, theta)
            keys = [_turn(k[s, kv], s, config.rotary_dim, theta) for s in seen]
            scores = torch.stack([query @ key for key in keys]) / math.sqrt(config.head_dim)
            weights = scores.softmax(0)
            out[t, head] = sum(w * v[s, kv] for w, s in zip(weights, seen, strict=True))
    return out.flatten(1) @ module.o_proj.weight.T


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    ("layer_type", "rotary"), [("hybrid", 0.5), ("hybrid", 0.0), ("hybrid_sliding", 1.0)]
)
@torch.no_grad()
def test_standard_attention(kv_heads, layer_type, rotary):
    """Oracle: multi-head and grouped-query attention written out in loops."""
    config = small_config(
        attention="standard",
        num_key_value_heads=kv_heads,
        partial_rotary_factor=rotary,
        sliding_window=3,
    )
    module = StandardAttention(config, layer_type)
    randomise(module, 1)
    x = torch.randn(2, 7, config.hidden_size, generator=torch.Generator().manual_seed(2))
    layout = build_layout(config, (2, 7), x.device, torch.float32)
    actual = module(x, layout, None)
    window = 3 if layer_type == "hybrid_sliding" else None
    expected = torch.stack([_attention_by_hand(module, row, config, window) for row in x])
    assert relative_error(actual, expected) < TOLERANCE


def test_standard_attention_has_no_convolution_state():
    model = small_model(0, attention="standard")
    assert not any("conv" in name or "temp" in name for name, _ in model.named_parameters())
    state = model.new_state(2)
    assert all(s.conv_tail is None and s.lagged_value is None for s in state.layers)
    assert state.nbytes == state.kv_nbytes


# Routers


@torch.no_grad()
def test_linear_router():
    """Oracle: softmax of one matrix product, argmax after the biases."""
    model = small_model(3, router="linear")
    assert not any("router_states_scale" in name for name, _ in model.named_parameters())
    for block in model.model.layers:
        gate = block.mlp.gate
        assert isinstance(gate, LinearRouter)
        x = torch.randn(2, 5, model.config.hidden_size)
        routing = gate(x, None)
        expected = (x @ gate.out_proj.weight.T).softmax(-1)
        assert relative_error(routing.probabilities, expected) < TOLERANCE
        assert torch.equal(routing.chosen, (expected + gate.balancing_biases).argmax(-1))
        assert routing.state is None


@torch.no_grad()
def test_depth_averaging_reaches_the_next_router():
    """Oracle: the equation r_l = W x + b + gamma * r_(l-1), by hand."""
    config = small_config()
    gate = ZayaRouter(config, first=False)
    randomise(gate, 4)
    x, previous = torch.randn(1, 6, config.hidden_size), torch.randn(1, 6, 16)
    routing = gate(x, previous)
    state = x @ gate.down_proj.weight.T + gate.down_proj.bias + gate.router_states_scale * previous
    assert relative_error(routing.state, state) < TOLERANCE
    mlp = gate.router_mlp
    h = state * (state.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()
    h = h * mlp.norm.weight
    h = F.gelu(h @ mlp.fc1.weight.T + mlp.fc1.bias)
    h = F.gelu(h @ mlp.fc2.weight.T + mlp.fc2.bias)
    expected = (h @ mlp.out_proj.weight.T).softmax(-1)
    assert relative_error(routing.probabilities, expected) < TOLERANCE
    other = gate(x, -previous)
    assert relative_error(other.probabilities, routing.probabilities) > 1e-2


@pytest.mark.parametrize("router", ["zaya", "linear"])
def test_balancing_biases_change_the_choice_and_not_the_weight(router):
    """Oracle: weight is the unbiased probability of whatever class the biases choose."""
    model = small_model(5, router=router, num_hidden_layers=1, layer_types=("hybrid",))
    gate = model.model.layers[0].mlp.gate
    tokens = tokens_for(model, 2, 9)
    before = model(tokens, with_routing=True).routing[0]
    for favoured in range(model.config.num_router_classes):
        gate.balancing_biases.zero_()
        gate.balancing_biases[favoured] = 2.0
        after = model(tokens, with_routing=True).routing[0]
        assert (after.chosen == favoured).all()
        assert torch.equal(after.probabilities, before.probabilities)
        assert torch.equal(after.weight, before.probabilities[..., favoured])
        after.weight.sum().backward()
    assert len(before.chosen.unique()) > 1
    assert not gate.balancing_biases.requires_grad
    assert "balancing_biases" not in dict(gate.named_parameters())


# The skip class


def _mixture(kind: str, favoured: int | None = None) -> tuple[MixtureOfExperts, torch.Tensor]:
    config = small_config(skip_expert=kind)
    module = MixtureOfExperts(config, first=True)
    randomise(module, 6)
    if favoured is None:
        module.gate.balancing_biases[-1] += 0.1
    else:
        module.gate.balancing_biases.zero_()
        module.gate.balancing_biases[favoured] = 2.0
    return module, torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", ["zero", "identity", "none"])
@torch.no_grad()
def test_mixture_of_experts(kind):
    """Oracle: one token at a time through the expert its routing names."""
    module, x = _mixture(kind)
    out, routing = module(x, None)
    weights = module.experts
    assert routing.probabilities.shape[-1] == (4 if kind == "none" else 5)
    expected = torch.zeros_like(x)
    for at in [(i, j) for i in range(2) for j in range(40)]:
        chosen, p = int(routing.chosen[at]), float(routing.weight[at])
        if chosen == 4:
            expected[at] = p * x[at] if kind == "identity" else 0.0
            continue
        gate, up = (weights.gate_up_proj[chosen] @ x[at]).chunk(2)
        expected[at] = p * (weights.down_proj[chosen] @ (F.silu(gate) * up))
    assert len(routing.chosen.unique()) == routing.probabilities.shape[-1], "a class is untested"
    assert relative_error(out, expected) < TOLERANCE


@pytest.mark.parametrize("tokens", [8, 80])
@pytest.mark.parametrize("kind", ["zero", "identity"])
def test_every_token_skips(kind, tokens):
    """Zero adds nothing, identity the input times its probability; experts learn nothing."""
    module, x = _mixture(kind, favoured=4)
    x = x.flatten(0, 1)[None, :tokens].requires_grad_()
    out, routing = module(x, None)
    assert (routing.chosen == 4).all()
    expected = x * routing.weight[..., None] if kind == "identity" else torch.zeros_like(x)
    assert torch.equal(out, expected)
    out.square().sum().backward()
    for name, parameter in module.experts.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient, which stalls a reduction"
        assert not parameter.grad.any(), name
    assert bool(x.grad.isfinite().all())
    router_learns = bool(module.gate.down_proj.weight.grad.any())
    assert router_learns == (kind == "identity")


def test_without_a_skip_class_no_token_skips():
    module, x = _mixture("none")
    module.gate.balancing_biases.copy_(torch.tensor([0.0, 0.0, 0.0, 5.0]))
    out, routing = module(x, None)
    assert (routing.chosen == 3).all()
    assert bool((out.abs().amax(-1) > 0).all())


# Residual stream


@torch.no_grad()
def test_plain_residual():
    """Oracle: scaled residuals at scale one and bias zero."""
    plain = small_model(8, residual="plain")
    assert not any("residual" in n or "input_hidden" in n for n, _ in plain.named_parameters())
    scaled = Zaya(plain.config.model_copy(update={"residual": "scaled"}))
    missing, unexpected = scaled.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected
    assert all("_scale" in name or "_bias" in name for name in missing)
    tokens = tokens_for(plain, 2, 9)
    assert relative_error(plain_logits(plain, tokens), plain_logits(scaled, tokens)) < 1e-6


@torch.no_grad()
def test_residual_scaling():
    """Oracle: both streams are (x + bias) * scale before the sum, channel by channel."""
    merge = ResidualScaling(5)
    randomise(merge, 9)
    output, stream = torch.randn(1, 2, 5), torch.randn(1, 2, 5)
    expected = (output + merge.hidden_states_bias) * merge.hidden_states_scale
    expected = expected + (stream + merge.residual_bias) * merge.residual_scale
    assert torch.allclose(merge(output, stream)[0], expected)


# Heads, context


def test_tied_and_untied_heads():
    """Oracle: hidden times the head's matrix, which is the embedding's only where tied."""
    for tied in (True, False):
        model = small_model(1, tie_word_embeddings=tied)
        assert ("lm_head.weight" in model.state_dict()) == (not tied)
        tokens = tokens_for(model, 2, 7)
        hidden = model(tokens).hidden
        embedding = model.model.embed_tokens.weight
        head = embedding if tied else model.lm_head.weight
        assert model.head_weight is head
        assert torch.allclose(model.logits(hidden), hidden @ head.T, atol=1e-5)
        targets = torch.cat([tokens[:, 1:], tokens.new_full((2, 1), -100)], dim=1)
        logits = (hidden @ head.T).flatten(0, 1)
        expected = F.cross_entropy(logits, targets.flatten(), reduction="sum").detach()
        assert float(model.loss(hidden, targets).detach()) == pytest.approx(
            float(expected), rel=1e-5
        )
        model.loss(hidden, targets).backward()
        absent = torch.ones(model.config.vocab_size, dtype=torch.bool)
        absent[tokens.flatten()] = False
        touched = bool(embedding.grad[absent].any())
        assert touched == tied, "an embedding that no token used learns from the head alone"


@torch.no_grad()
def test_set_context_changes_the_rope_base_of_full_layers():
    """Oracle: a model that was made with that base."""
    model = small_model(1)
    tokens = tokens_for(model, 1, 9)
    before = plain_logits(model, tokens)
    model.set_context(7_000.0, 4096)
    other = Zaya(small_config(rope_theta=7_000.0, max_position_embeddings=4096))
    other.load_state_dict(model.state_dict())
    after = plain_logits(model, tokens)
    assert model.config == other.config
    assert torch.equal(after, plain_logits(other, tokens))
    assert relative_error(after, before) > 1e-3


# Configuration


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 3}, r"num_attention_heads \(3\).*num_key_value_heads \(2\)"),
        (
            {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 15},
            "current and a delayed half",
        ),
        ({"partial_rotary_factor": 0.2}, "= 3 must be even"),
        ({"layer_types": ("hybrid",)}, "1 entries for 3 layers"),
        ({"layer_types": ("hybrid", "full", "hybrid")}, "hybrid_sliding"),
        ({"sliding_window": None}, "sliding_window must be set"),
        ({"sliding_window": 0}, "greater than 0"),
        ({"eos_token_id": 61}, r"eos_token_id 61 is outside the vocabulary \(61\)"),
        ({"pad_token_id": -1}, "pad_token_id -1 is outside"),
        ({"num_experts": 0}, "greater than 0"),
        ({"hidden_sizes": 32}, "Extra inputs"),
        ({"attention": "flash"}, "'cca' or 'standard'"),
        ({"skip_expert": "drop"}, "'zero', 'identity' or 'none'"),
        ({"rms_norm_eps": 0}, "greater than 0"),
        ({"cca_time0": 0}, "greater than or equal to 1"),
    ],
)
def test_configuration_errors_name_the_field_and_the_numbers(changes, message):
    with pytest.raises(ValidationError, match=message):
        small_config(**changes)


def test_configuration_is_frozen():
    config = small_config()
    with pytest.raises(ValidationError, match="frozen"):
        config.hidden_size = 64


# Initial values


ARCHITECTURES = [
    {},
    {"tie_word_embeddings": False, "cca_time1": 3},
    {"attention": "standard", "router": "linear", "residual": "plain", "skip_expert": "none"},
]


@pytest.mark.parametrize("changes", ARCHITECTURES)
def test_init_weights(changes):
    """The same values for the same seed, others for another; all finite."""
    models = [Zaya(small_config(**changes)) for _ in range(3)]
    for model, seed in zip(models, (3, 3, 4), strict=True):
        init_weights(model, seed)
    a, b, c = (model.state_dict() for model in models)
    for name, tensor in a.items():
        assert bool(tensor.isfinite().all()), name
        assert torch.equal(tensor, b[name]), f"{name} is not reproducible"
        if tensor.ndim > 1 and "depthwise" not in name:
            assert not torch.equal(tensor, c[name]), f"{name} does not depend on the seed"
        if name.endswith("temp"):
            assert (tensor == 1).all()
        if name.endswith("balancing_biases"):
            skip = models[0].config.skip_expert != "none"
            assert tensor[-1] == (-1.0 if skip else 0.0)
            assert not tensor[:-1].any()
    assert bool(plain_logits(models[0], tokens_for(models[0], 2, 9)).isfinite().all())


@pytest.mark.parametrize("changes", ARCHITECTURES)
def test_init_weights_fills_everything_whatever_it_held(changes):
    """Oracle: a fresh model. One that was made on the meta device holds arbitrary memory."""
    fresh, used = Zaya(small_config(**changes)), Zaya(small_config(**changes))
    with torch.no_grad():
        for tensor in used.state_dict().values():
            tensor.fill_(float("nan"))
    init_weights(fresh, 3)
    init_weights(used, 3)
    for name, tensor in used.state_dict().items():
        assert torch.equal(tensor, fresh.state_dict()[name]), f"{name} was not filled"


def test_initial_loss_is_that_of_a_uniform_guess():
    """Oracle: log(vocabulary). A larger loss would mean logits far from zero at the start."""
    model = Zaya(PRESETS["tiny"])
    init_weights(model, seed=0)
    tokens = tokens_for(model, 4, 64)
    with torch.no_grad():
        loss = float(model.loss(model(tokens[:, :-1]).hidden, tokens[:, 1:])) / (4 * 63)
        load = model(tokens).load
    assert loss == pytest.approx(math.log(512), abs=0.1)
    assert not load[:, -1].any(), "the skip class wins from the start"
    assert bool((load[:, :-1] > 0).all()), "an expert is idle from the start"
