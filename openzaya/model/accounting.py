"""What a model costs, in closed form: parameters, FLOPs, bytes of state, memory.

Everything follows from a `ModelConfig` alone, so the largest preset is counted in microseconds and
without torch. The formulas are those of the CCA paper (arXiv 2510.04476, Table II) for attention,
with E the width of the residual stream, E/C1 that of the query latent and E/C2 that of the key and
the value latent; the rest counts the matrices of arXiv 2605.05365. One multiply-add is two FLOPs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from openzaya.model.config import LayerType, ModelConfig

BF16, FP32 = 2, 4
"""Bytes of one number."""

TRAINING_FACTOR = 3
"""Forward and backward over forward: each product has two products as its gradient."""


@dataclass(frozen=True)
class Parameters:
    """Number of parameters by part (balancing biases are buffers, and not counted).

    Attributes:
        attention: projections of queries, keys, values and output, and key temperatures.
        convolutions: both causal convolutions of CCA.
        router: all of the router, its own norm and depth-averaging scales included.
        experts: all experts of all layers.
        active_experts: what one token passes through: one expert a layer (top-1).
        norms: RMSNorm gains and residual scales and biases.
        embeddings: the embedding, and the LM head where it is not tied to it.
        matrices: those that Muon updates: 2-D hidden matrices and expert stacks, without
            embeddings, convolutions and the router's last projection.
        castable: those that serving may hold in bf16 (`precision.py`): projections, experts and
            embeddings.
        total, total_without_embeddings, active, active_without_embeddings: sums. The reports'
            "8.3B total, 0.76B active" are counts without embeddings.
    """

    attention: int
    convolutions: int
    router: int
    experts: int
    active_experts: int
    norms: int
    embeddings: int
    matrices: int
    castable: int
    total: int
    total_without_embeddings: int
    active: int
    active_without_embeddings: int


@dataclass(frozen=True)
class Flops:
    """FLOPs of one forward per token; norms, activations and other elementwise work not counted.

    Attributes:
        attention: linear projections, (1/C1 + 1/C2) 4E^2 a layer (Table II, per token).
        convolutions: 2 FLOPs for each weight of both convolutions.
        scores: query-key products and the weighted sum of values, 4 (E/C1) keys a layer.
        router, experts: their matrices; one expert a layer.
        lm_head: 2 E vocab.
        total, total_without_head: sums.
    """

    attention: float
    convolutions: float
    scores: float
    router: float
    experts: float
    lm_head: float
    total: float
    total_without_head: float


@dataclass(frozen=True)
class StateBytes:
    """What a sequence keeps between tokens.

    Attributes:
        kv_per_token: keys and values of one more token in all layers (below the sliding window).
        mha_kv_per_token: the same for multi-head attention of width E: 2E numbers a layer.
        compression: the second over the first.
        fixed_per_sequence: conv tails and lagged values, always fp32.
        kv_at_context: keys and values of a whole context; sliding layers stop at their window.
        per_sequence: the two together.
    """

    kv_per_token: int
    mha_kv_per_token: int
    compression: float
    fixed_per_sequence: int
    kv_at_context: int
    per_sequence: int


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes that training holds all the time; activations come on top.

    Attributes:
        weights, gradients: fp32.
        muon: one momentum for each parameter of the matrices.
        adamw: two moments for each of the rest.
    """

    weights: int
    gradients: int
    muon: int
    adamw: int
    total: int


@dataclass(frozen=True)
class ServingMemory:
    """Bytes that serving holds.

    Attributes:
        weights: projections, experts and embeddings in bf16, the rest in fp32.
        state: of `batch` sequences of `context` tokens, keys and values in bf16.
    """

    weights: int
    state: int
    total: int


@dataclass(frozen=True)
class Account:
    """Everything about one model at one context and batch; all FLOPs are per token.

    Attributes:
        forward: of a full sequence of `context` tokens, averaged over its tokens.
        training_flops: forward and backward.
        decode: of the token that comes at the end of `context` tokens.
    """

    context: int
    batch: int
    parameters: Parameters
    forward: Flops
    training_flops: float
    decode: Flops
    state: StateBytes
    training: TrainingMemory
    serving: ServingMemory

    def to_json(self) -> dict[str, Any]:
        """Nested dict of plain numbers."""
        return asdict(self)


def account(
    config: ModelConfig, context: int | None = None, batch: int = 1, moment_bytes: int = FP32
) -> Account:
    """Count everything.

    Args:
        context: tokens of a sequence; None takes the longest the model is made for.
        batch: sequences that are served at once.
        moment_bytes: of one number of optimizer state.
    """
    context = config.max_position_embeddings if context is None else context
    parameters = count_parameters(config)
    forward = forward_flops(config, context)
    state = state_bytes(config, context)
    return Account(
        context=context,
        batch=batch,
        parameters=parameters,
        forward=forward,
        training_flops=TRAINING_FACTOR * forward.total,
        decode=decode_flops(config, context),
        state=state,
        training=training_memory(parameters, moment_bytes),
        serving=serving_memory(parameters, state, batch),
    )


def count_parameters(config: ModelConfig) -> Parameters:
    """Count parameters by part.

    Attention of one CCA layer (Table II, row CCGQA) is 2E^2/C1 + 2E^2/C2 + Conv: query and output
    projections of E x E/C1, key and value projections of E x E/C2 (the value's are two halves),
    and for the convolutions channels * t0 + channels * head_dim * t1 weights and two biases.
    Plain attention has the same projections and no convolutions.
    """
    layers, width = config.num_hidden_layers, config.hidden_size
    classes, inner = config.num_router_classes, config.moe_intermediate_size
    projections = layers * _projection_weights(config)
    cca = config.attention == "cca"
    temperatures = layers * config.num_key_value_heads * cca
    convolutions = layers * (_conv_weights(config) + 2 * config.conv_channels) * cca
    router_matrices = layers * _router_matrices(config)
    router = router_matrices + layers * width * classes
    if config.router == "zaya":
        state = config.router_hidden_size
        # Biases of three maps and a norm per layer; depth averaging in all layers but the first.
        router = router_matrices + layers * (state * classes + 4 * state) + (layers - 1) * state
    one_expert = layers * 3 * width * inner
    experts = config.num_experts * one_expert
    norms = (2 * layers + 1) * width
    if config.residual == "scaled":
        norms += (8 * layers + 2) * width  # two merges of four vectors, and the input's affine
    embeddings = config.vocab_size * width * (1 if config.tie_word_embeddings else 2)
    shared = projections + temperatures + convolutions + router + norms
    return Parameters(
        attention=projections + temperatures,
        convolutions=convolutions,
        router=router,
        experts=experts,
        active_experts=one_expert,
        norms=norms,
        embeddings=embeddings,
        matrices=projections + router_matrices + experts,
        castable=projections + experts + embeddings,
        total=shared + experts + embeddings,
        total_without_embeddings=shared + experts,
        active=shared + one_expert + embeddings,
        active_without_embeddings=shared + one_expert,
    )


def _projection_weights(config: ModelConfig) -> int:
    """Of one layer: query and output, key and value."""
    return 2 * config.hidden_size * (config.query_width + config.key_width)


def _conv_weights(config: ModelConfig) -> int:
    """Of one layer, without biases: one weight a tap and channel, then head_dim of them."""
    return config.conv_channels * (config.cca_time0 + config.head_dim * config.cca_time1)


def _router_matrices(config: ModelConfig) -> int:
    """Of one layer, without the last projection: down to R, then two R x R."""
    if config.router == "linear":
        return 0
    state = config.router_hidden_size
    return config.hidden_size * state + 2 * state * state


def forward_flops(config: ModelConfig, context: int) -> Flops:
    """Per token, averaged over a causal sequence of `context` tokens.

    Table II counts 4BES^2/C1 for scores, as if all tokens saw each other. Here token number i sees
    i tokens, (context + 1) / 2 on average, and in a sliding layer no more than its window.
    """
    keys = [_mean_keys(context, config.window(layer_type)) for layer_type in config.types]
    return _flops(config, keys)


def decode_flops(config: ModelConfig, context: int) -> Flops:
    """For the one token that ends `context` tokens: it sees all of them, itself included.

    Table II: (1/C1 + 1/C2) 4E^2 + 4ES/C1 + Conv for attention at batch 1.
    """
    keys = [_seen(config, layer_type, context) for layer_type in config.types]
    return _flops(config, [float(count) for count in keys])


def _flops(config: ModelConfig, keys: list[float]) -> Flops:
    """For one token that sees `keys[layer]` tokens in each layer."""
    layers, width = config.num_hidden_layers, config.hidden_size
    classes = config.num_router_classes
    last = (config.router_hidden_size if config.router == "zaya" else width) * classes
    attention = 2.0 * layers * _projection_weights(config)
    convolutions = 2.0 * layers * _conv_weights(config) * (config.attention == "cca")
    scores = 4.0 * config.query_width * sum(keys)
    router = 2.0 * layers * (_router_matrices(config) + last)
    experts = 2.0 * layers * 3 * width * config.moe_intermediate_size
    lm_head = 2.0 * width * config.vocab_size
    body = attention + convolutions + scores + router + experts
    return Flops(attention, convolutions, scores, router, experts, lm_head, body + lm_head, body)


def _seen(config: ModelConfig, layer_type: LayerType, context: int) -> int:
    """Tokens that the last of `context` tokens sees, which is also what the layer has to keep."""
    return min(context, config.window(layer_type) or context)


def _mean_keys(context: int, window: int | None) -> float:
    """Mean of min(i, window) over i = 1..context."""
    window = min(context, window or context)
    return (window * (window + 1) / 2 + (context - window) * window) / context


def state_bytes(config: ModelConfig, context: int, kv_bytes: int = BF16) -> StateBytes:
    """What `state.py` keeps for one sequence.

    A layer caches E/C2 numbers each of keys and values a token (2BSE/C2 in Table II, against 2BSE
    for multi-head attention), and once per sequence the last latents before the convolutions and
    the lagged half of the value.

    Args:
        kv_bytes: of one number of keys and values; conv tail and lagged value are always fp32.
    """
    layers = config.num_hidden_layers
    one_layer = 2 * config.key_width * kv_bytes
    multi_head = layers * 2 * config.hidden_size * kv_bytes
    fixed = 0
    if config.attention == "cca":
        fixed = layers * FP32 * (config.conv_history * config.conv_channels + config.key_width // 2)
    at_context = one_layer * sum(_seen(config, kind, context) for kind in config.types)
    return StateBytes(
        kv_per_token=layers * one_layer,
        mha_kv_per_token=multi_head,
        compression=multi_head / (layers * one_layer),
        fixed_per_sequence=fixed,
        kv_at_context=at_context,
        per_sequence=at_context + fixed,
    )


def training_memory(parameters: Parameters, moment_bytes: int = FP32) -> TrainingMemory:
    """fp32 weights and gradients; Muon keeps one number for each of its own, AdamW two.

    Args:
        moment_bytes: of one number of optimizer state (`momentum_dtype`, `adamw_state_dtype`).
    """
    weights = gradients = FP32 * parameters.total
    muon = moment_bytes * parameters.matrices
    adamw = 2 * moment_bytes * (parameters.total - parameters.matrices)
    return TrainingMemory(weights, gradients, muon, adamw, weights + gradients + muon + adamw)


def serving_memory(parameters: Parameters, state: StateBytes, batch: int) -> ServingMemory:
    """bf16 weights where precision allows, and the state of `batch` sequences."""
    castable = parameters.castable
    weights = BF16 * castable + FP32 * (parameters.total - castable)
    held = batch * state.per_sequence
    return ServingMemory(weights, held, weights + held)
