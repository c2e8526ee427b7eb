"""The whole model in bf16 on the C kernels, against fp32 and against the same written out.

Rounding flips a token to another expert now and then, which outweighs all rounding and is no
error: the fp32 model's choices are forced on both bf16 runs.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from openzaya.kernels.native.library import Library, library, written_out
from openzaya.model.layout import build_layout
from openzaya.model.lora import attach, new_adapter
from openzaya.model.model import Zaya
from openzaya.model.router import Routing
from tests.kernels.native import PACKINGS, needs_kernels, positions
from tests.model.helpers import pad_rows, small_model, tokens_for
from tests.oracle import relative_error

pytestmark = needs_kernels

SIZES = {"head_dim": 32, "hidden_size": 64, "moe_intermediate_size": 32, "sliding_window": 20}
VARIANTS = {
    "zaya": {},
    "standard": {"attention": "standard"},
    "linear-router": {"router": "linear"},
    "plain-residual": {"residual": "plain"},
    "rounded-residual": {"residual_in_fp32": False},
    "untied": {"tie_word_embeddings": False},
    "full-attention": {"layer_types": None},
    "wide-window": {"sliding_window": 65},
    "identity": {"skip_expert": "identity"},
    "no-skip": {"skip_expert": "none"},
    "one-kv-head": {"num_key_value_heads": 1, "partial_rotary_factor": 1.0},
    "no-rotary": {"partial_rotary_factor": 0.0, "head_dim": 64},
    "long-convolutions": {"cca_time0": 3, "cca_time1": 4},
    "odd-sizes": {"hidden_size": 48, "moe_intermediate_size": 40, "head_dim": 24},
}
ALL = {
    *("merge_norm_forward", "attention_forward", "cca_forward", "experts_forward"),
    *("cross_entropy", "merge_norm_backward", "attention_backward", "cca_backward"),
    "experts_backward",
}


def model_of(variant: str, dtype: torch.dtype, seed: int = 3, **changes) -> Zaya:
    return small_model(seed, dtype, **{**SIZES, **VARIANTS[variant], **changes}).train()


def batch_of(model: Zaya, kind: str):
    """Arguments of a forward, and targets."""
    if kind == "plain":
        tokens = tokens_for(model, 2, 71)
        return (tokens[:, :-1],), tokens[:, 1:]
    if kind == "packed":
        places = positions(PACKINGS["rows-differ"]).long()
        tokens = tokens_for(model, places.shape[0], places.shape[1] + 1)
        return (tokens[:, :-1], places), tokens[:, 1:]
    rows = [tokens_for(model, 1, n, n)[0] for n in (70, 33, 5)]
    tokens, mask = pad_rows(rows, 75, kind, 0, model.config.vocab_size)
    return (tokens, None, mask), tokens_for(model, 3, 75, 9).masked_fill(~mask, -100)


def run(model: Zaya, arguments, targets, choices: list[Routing] | None = None):
    """Loss, gradients, and routings; with the experts of other routings if they are given."""
    handles = []
    if choices is not None:
        left = iter(choices)

        def force(_gate, _arguments, routing: Routing) -> Routing:
            index = next(left).chosen
            weight = routing.probabilities.gather(-1, index[..., None]).squeeze(-1)
            return Routing(index, weight, routing.probabilities, routing.state)

        handles = [b.mlp.gate.register_forward_hook(force) for b in model.model.layers]
    model.zero_grad()
    out = model(*arguments, with_routing=True)
    loss = model.loss(out.hidden, targets)
    loss.backward()
    for handle in handles:
        handle.remove()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}, out.routing


@pytest.fixture
def calls(monkeypatch) -> Counter[str]:
    """How often each kernel ran."""
    counts: Counter[str] = Counter()
    call = Library.call

    def counted(self, name, *arguments):
        counts[name] += 1
        call(self, name, *arguments)

    monkeypatch.setattr(Library, "call", counted)
    return counts


@pytest.mark.parametrize("kind", ["plain", "packed", "left", "holes"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_further_from_fp32_than_written_out(variant, kind, calls):
    """Oracle: fp32; and for what bf16 costs, the same model by torch alone."""
    exact = model_of(variant, torch.float32)
    arguments, targets = batch_of(exact, kind)
    loss, grads, routing = run(exact, arguments, targets)
    assert not calls
    errors = []
    for context in (nullcontext(), written_out()):
        before = calls.total()
        with context:
            a, b, _ = run(model_of(variant, torch.bfloat16), arguments, targets, routing)
        assert (calls.total() > before) == (not errors)
        scale = {n: g.norm().clamp_min(1e-3 * loss.sqrt()) for n, g in grads.items()}
        errors.append(
            {
                "loss": float((a - loss).abs() / loss),
                **{n: float((b[n] - g).norm() / scale[n]) for n, g in grads.items()},
            }
        )
    if variant in ("zaya", "identity", "untied", "rounded-residual"):
        assert set(calls) == ALL | {"sort_by_expert"}
    kernels, torch_alone = errors
    for name, error in kernels.items():
        # A temperature's gradient cancels, so that either may be right by luck.
        slack = 0.05 if name.endswith("temp") else 0.02
        assert error < 1.25 * torch_alone[name] + slack, f"{name}: {error}, {torch_alone[name]}"
    assert sum(kernels.values()) < 1.1 * sum(torch_alone.values())


@pytest.mark.parametrize("residual", ["scaled", "plain"])
def test_residual_stream_is_fp32_on_the_kernels(residual, calls):
    """As `test_precision.py` has it for torch alone: what blocks take and give is fp32, and holds
    values that bf16 could not; and so is the gradient that goes back between them."""
    model = model_of("zaya", torch.bfloat16, residual=residual)
    seen = []

    def finer(stream: torch.Tensor) -> None:
        assert stream.dtype == torch.float32
        assert (stream.bfloat16().float() != stream).float().mean() > 0.5
        seen.append(stream)

    def check(_, arguments, output):
        finer(output[0])
        assert arguments[0].dtype == torch.float32
        output[0].register_hook(finer)

    for block in model.model.layers:
        block.register_forward_hook(check)
    arguments, targets = batch_of(model, "packed")
    run(model, arguments, targets)
    assert set(calls) == ALL | {"sort_by_expert"}
    assert len(seen) == 2 * model.config.num_hidden_layers


@pytest.mark.parametrize("variant", ["zaya", "standard", "identity", "long-convolutions"])
@pytest.mark.parametrize("name", PACKINGS)
@torch.no_grad()
def test_packed_documents_are_as_alone(variant, name):
    """Oracle: each document alone, in bf16. Attention, both convolutions and the value shift begin
    anew. Rounding is the same but for the length of sums, so a flip of an expert is rare; where
    the choices agree so do the states."""
    model = model_of(variant, torch.bfloat16).eval()
    rows = PACKINGS[name]
    tokens = tokens_for(model, len(rows), sum(rows[0]))
    whole = model(tokens, positions(rows).long(), with_routing=True)
    begin, compared = [0] * len(rows), 0
    for row, lengths in enumerate(rows):
        for length in lengths[:12]:
            part = slice(begin[row], begin[row] + length)
            begin[row] += length
            alone = model(tokens[row : row + 1, part], with_routing=True)
            same = torch.ones(length, dtype=torch.bool)
            for ours, theirs in zip(alone.routing, whole.routing, strict=True):
                same &= ours.chosen[0] == theirs.chosen[row, part]
            # What a flip changes, later tokens attend to: up to the first one all must agree.
            until = length if same.all() else int(same.int().argmin())
            if until:
                error = relative_error(
                    whole.hidden[row, part][:until].float(), alone.hidden[0, :until].float()
                )
                assert error < 0.03, (row, part, until)
                compared += until
    assert compared > 0.5 * sum(begin)


def test_a_change_in_one_document_reaches_no_other():
    """Bit for bit, values and gradients."""
    model = model_of("zaya", torch.bfloat16)
    lengths = [40, 1, 63, 2, 64]
    places = positions([lengths]).long()
    tokens = tokens_for(model, 1, sum(lengths))
    other = tokens_for(model, 1, sum(lengths), 1)
    part = slice(41, 104)
    other[:, part] = tokens[:, part]
    results = []
    for given in (tokens, other):
        model.zero_grad()
        embedded = []
        handle = model.model.embed_tokens.register_forward_hook(
            lambda _m, _a, out, kept=embedded: kept.append(out) or out.retain_grad()
        )
        hidden = model(given, places).hidden[:, part]
        hidden.float().square().sum().backward()
        handle.remove()
        gradient = embedded[0].grad
        outside = torch.ones(gradient.shape[1], dtype=torch.bool)
        outside[part] = False
        assert not gradient[:, outside].any()
        results.append((hidden, gradient[:, part]))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_two_runs_are_bit_identical():
    model = model_of("zaya", torch.bfloat16)
    arguments, targets = batch_of(model, "packed")
    first, second = (run(model, arguments, targets) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])


def test_recomputing_a_block_changes_no_bit():
    """Gradient checkpointing with stream and router state as what goes in and out: the recomputed
    choices of experts are those of the forward pass (relatives of field note 45)."""
    model = model_of("zaya", torch.bfloat16)
    tokens = tokens_for(model, 2, 70)
    grads = []
    for recompute in (False, True):
        model.zero_grad()
        layout = build_layout(model.config, (2, 70), tokens.device, torch.bfloat16)
        stream, state = model.model.embed(tokens), None
        for block in model.model.layers:
            if recompute:
                stream, routing = checkpoint(
                    block, stream, state, layout, None, use_reentrant=False
                )
            else:
                stream, routing = block(stream, state, layout, None)
            state = routing.state
        model.loss(model.model.norm(stream, torch.bfloat16), tokens).backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in grads[0].items():
        assert torch.equal(grads[1][name], gradient), name


@pytest.mark.parametrize("targets", [["attention", "experts"], ["experts"], ["o_proj.weight"]])
def test_adapters_train_on_frozen_weights(targets, calls):
    """Oracle: the gradients of the same adapters by torch alone."""
    model = model_of("zaya", torch.bfloat16)
    arguments, labels = batch_of(model, "packed")
    model.requires_grad_(False)
    adapter = new_adapter(model.config, targets, rank=2, alpha=4.0)
    for pair in adapter.pairs.values():
        pair.b.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    attach(model, adapter)
    results = []
    routing = None
    for context in (nullcontext(), written_out()):
        with context:
            loss, grads, routing = run(model, arguments, labels, routing)
        results.append((loss, {n: g for n, g in grads.items() if g is not None}))
    assert set(calls) == ALL | {"sort_by_expert"}
    (loss, grads), (expected_loss, expected) = results
    assert float(loss) == pytest.approx(float(expected_loss), rel=2e-3)
    assert grads.keys() == expected.keys()
    assert all("parametrizations" in name for name in grads)
    for name, gradient in grads.items():
        error = float((gradient - expected[name]).norm() / expected[name].norm())
        assert error < 0.06, f"{name}: {error}"


@pytest.mark.parametrize(
    "name", ["embed_tokens", "o_proj", "gate_up_proj", "temp", "grouped.weight"]
)
def test_a_weight_that_is_not_a_number_shows_in_the_loss(name):
    """The trainer stops on it; nothing hangs, crashes or hides it."""
    model = model_of("zaya", torch.bfloat16)
    arguments, targets = batch_of(model, "packed")
    for full, parameter in model.named_parameters():
        if name in full:
            with torch.no_grad():
                parameter.fill_(float("nan"))
    loss, _, _ = run(model, arguments, targets)
    assert not bool(loss.isfinite())


def test_one_set_of_positions_for_all_rows():
    """The kernels read a position per token: fewer must not send them past the end."""
    model = model_of("zaya", torch.bfloat16)
    tokens = tokens_for(model, 3, 70)
    places = positions([[30, 40]]).long()
    with torch.no_grad():
        expected = model(tokens, places.repeat(3, 1)).hidden
        assert torch.equal(model(tokens, places).hidden, expected)
        assert torch.equal(model(tokens, places.expand(3, 70)).hidden, expected)
    with pytest.raises(RuntimeError):
        model(tokens, positions([[30, 40]] * 2).long())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_is_the_same(context):
    model = model_of("zaya", torch.bfloat16)
    arguments, targets = batch_of(model, "left")
    loss, _, _ = run(model, arguments, targets)
    with context():
        assert torch.equal(model.loss(model(*arguments).hidden, targets), loss)
    assert library() is not None
