"""Comparison of traces: one thing is changed, and the first stage that it touches is named."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from openzaya.checkpoint.load import load_model
from openzaya.checkpoint.trace import Probe, make_probe, stages
from openzaya.checkpoint.trace_compare import Comparison, compare, default_tolerance
from openzaya.checkpoint.trace_file import (
    GOLDEN,
    GOLDEN_TRACE,
    Trace,
    make_trace,
    read_trace,
    write_trace,
)
from openzaya.errors import UserError
from openzaya.model.cca import CCAttention
from openzaya.model.model import Zaya
from tests.checkpoint.golden_trace import golden_model
from tests.model.helpers import small_model

GOLDEN_MODEL = golden_model()
PROBE = make_probe(GOLDEN_MODEL.config)


@pytest.fixture(scope="module")
def golden() -> Trace:
    return read_trace(GOLDEN_TRACE, complete=True)


def changed(change: Callable[[Zaya], object]) -> Trace:
    """The golden model's trace after a change of the model."""
    model = copy.deepcopy(GOLDEN_MODEL)
    with torch.no_grad():
        change(model)
    return make_trace(model, PROBE)


def edited(trace: Trace, **tensors: Tensor) -> Trace:
    """With some stages replaced; "__" stands for a dot."""
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    return dataclasses.replace(trace, tensors={**trace.tensors, **named})


def first_of(comparison: Comparison) -> str:
    assert comparison.first is not None
    assert not comparison.agrees
    return comparison.first.name


# One mistake at a time


def attention(model: Zaya, layer: int) -> CCAttention:
    part = model.model.layers[layer].self_attn
    assert isinstance(part, CCAttention)
    return part


def swap_halves(weight: Tensor, dim: int) -> None:
    weight.copy_(torch.cat(weight.chunk(2, dim)[::-1], dim))


def swap_values(model: Zaya) -> None:
    part = attention(model, 1).qkv_proj
    part.v_proj_current, part.v_proj_delayed = part.v_proj_delayed, part.v_proj_current


def swap_experts(model: Zaya) -> None:
    down = model.model.layers[1].mlp.experts.down_proj
    down[[0, 1]] = down[[1, 0]].clone()


def shift_residual(model: Zaya) -> None:
    """Each merge with the parameters of the next, as from counting sub-layers from one."""
    merges = [
        merge
        for layer in model.model.layers
        for merge in (layer.post_attention_residual_scale, layer.post_mlp_residual_scale)
    ]
    for this, following in zip(merges[1:], merges[2:] + merges[:1], strict=True):
        this.load_state_dict({k: v.clone() for k, v in following.state_dict().items()})


def set_config(**update: object) -> Callable[[Zaya], None]:
    def change(model: Zaya) -> None:
        model.config = model.config.model_copy(update=update)

    return change


def flip_taps(name: str) -> Callable[[Zaya], object]:
    def change(model: Zaya) -> None:
        weight = getattr(attention(model, 1).qkv_proj, name).weight
        weight.copy_(weight.flip(-1))

    return change


def no_depth_average(model: Zaya) -> None:
    model.model.layers[1].mlp.gate.router_states_scale.zero_()


LAYERS = "layers.{}."
MISTAKES: dict[str, tuple[Callable[[Zaya], object], str]] = {
    "input scale": (lambda m: m.model.input_hidden_states_scale.mul_(1.01), "embedded"),
    "norm of layer 2": (
        lambda m: m.model.layers[2].input_layernorm.weight.add_(1),
        "layers.2.attention.input",
    ),
    "depthwise taps": (flip_taps("conv_qk_depthwise"), "layers.1.attention.q_convolved"),
    "grouped taps": (flip_taps("conv_qk_grouped"), "layers.1.attention.q_convolved"),
    "temperature": (
        lambda m: attention(m, 1).qk_norm.temp.mul_(1.01),
        "layers.1.attention.k_normed",
    ),
    "RoPE base": (set_config(rope_theta=1e4), "layers.1.attention.q_rotated"),
    "sliding RoPE base": (set_config(sliding_rope_theta=1e4), "layers.0.attention.q_rotated"),
    "current and delayed values": (swap_values, "layers.1.attention.v"),
    "no window": (set_config(sliding_window=99), "layers.0.attention.context"),
    "window without the query": (set_config(sliding_window=4), "layers.0.attention.context"),
    "output projection": (
        lambda m: swap_halves(attention(m, 2).o_proj.weight, 0),
        "layers.2.attention.output",
    ),
    "residual scales": (shift_residual, "layers.0.residual_experts"),
    "depth averaging": (no_depth_average, "layers.1.router.state"),
    "router norm": (
        lambda m: m.model.layers[0].mlp.gate.router_mlp.norm.weight.mul_(1.01),
        "layers.0.router.probabilities",
    ),
    "gate and up": (
        lambda m: swap_halves(m.model.layers[1].mlp.experts.gate_up_proj, 1),
        "layers.1.experts.output",
    ),
    "two experts": (swap_experts, "layers.1.experts.output"),
    "balancing bias, no flip": (
        lambda m: m.model.layers[1].mlp.gate.balancing_biases[0].add_(2e-3),
        "layers.1.router.margin",
    ),
    "final norm": (lambda m: m.model.norm.weight.mul_(1.01), "final_hidden"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_first_stage_of_a_mistake_is_named(mistake, golden):
    change, stage = MISTAKES[mistake]
    comparison = compare(golden, changed(change))
    assert first_of(comparison) == stage
    before = comparison.stages[: comparison.stages.index(comparison.first)]
    assert all(s.drift is not None and s.drift < 2e-6 for s in before)
    assert all(s.tokens == 69 for s in before)


def test_a_wrong_value_at_one_token_is_placed(golden):
    wrong = golden.tensors["layers.1.attention.v"].clone()
    wrong[2, 7, 1, 3] += 0.1
    first = compare(golden, edited(golden, layers__1__attention__v=wrong)).first
    assert (first.layer, first.row, first.column) == (1, 2, 7)
    scale = golden.tensors["layers.1.attention.v"].abs().max()
    assert first.drift == pytest.approx(0.1 / float(scale), rel=1e-5)


def test_padding_is_not_looked_at(golden):
    wrong = {}
    for name, tensor in golden.tensors.items():
        wrong[name] = tensor.clone()
        wrong[name][~golden.probe.padding_mask] = 1 if tensor.dtype == torch.bool else 3
    comparison = compare(golden, edited(golden, **wrong))
    assert comparison.agrees
    assert not comparison.flips
    assert not comparison.followed
    wrong["logits"][1, 0] = math.nan
    assert compare(golden, edited(golden, **wrong)).agrees


# Flips


def tied(layer: int, row: int, column: int, margin: float) -> tuple[Zaya, int]:
    """The golden model with the second best class of one token raised, up to `margin`."""
    model = copy.deepcopy(GOLDEN_MODEL)
    gate = model.model.layers[layer].mlp.gate
    probabilities = make_trace(model).tensors[f"layers.{layer}.router.probabilities"][row, column]
    values, classes = (probabilities + gate.balancing_biases).topk(2)
    gate.balancing_biases[classes[1]] += float(values[0] - values[1]) - margin
    return model, int(classes[1])


def raised(model: Zaya, layer: int, index: int, amount: float) -> Trace:
    model = copy.deepcopy(model)
    model.model.layers[layer].mlp.gate.balancing_biases[index] += amount
    return make_trace(model)


def test_a_flip_at_a_near_tie_is_no_drift():
    model, second = tied(1, 3, 4, margin=2e-6)
    reference = make_trace(model)
    comparison = compare(reference, raised(model, 1, second, 4e-6))
    assert comparison.agrees
    [flip] = comparison.flips
    assert flip.near_tie
    assert (flip.layer, flip.row, flip.column, flip.other) == (1, 3, 4, second)
    assert flip.reference == int(reference.tensors["layers.1.router.chosen"][3, 4])
    assert flip.margin == pytest.approx(2e-6, rel=0.2)
    tokens = {stage.name: stage.tokens for stage in comparison.stages}
    assert tokens["layers.1.router.chosen"] == 69
    assert tokens["layers.1.experts.output"] == 68
    assert tokens["layers.1.residual_experts"] == 68
    # From the next layer on, the rest of the document (ten tokens, this is the fifth) is out.
    assert tokens["layers.2.attention.input"] == tokens["logits"] == 69 - 6
    assert all(stage.drift < 2e-5 for stage in comparison.stages)


def test_a_flip_across_a_large_margin_is_real():
    model, second = tied(1, 3, 4, margin=1e-3)
    comparison = compare(make_trace(model), raised(model, 1, second, 2e-3))
    assert first_of(comparison) == "layers.1.router.chosen"
    assert (comparison.first.row, comparison.first.column) == (3, 4)
    assert comparison.first.problem == "1 real flip"
    [flip] = comparison.flips
    assert not flip.near_tie
    assert flip.margin == pytest.approx(1e-3, rel=0.01)


def test_a_looser_tolerance_excuses_no_real_flip():
    """What is accepted of low precision does not widen what the probabilities explain."""
    model, second = tied(1, 3, 4, margin=1e-3)
    comparison = compare(make_trace(model), raised(model, 1, second, 2e-3), tolerance=0.05)
    assert first_of(comparison) == "layers.1.router.chosen"


def test_a_flip_is_explained_by_the_drift_of_probabilities(golden):
    chosen = golden.tensors["layers.0.router.chosen"].clone()
    margin = golden.tensors["layers.0.router.margin"]
    chosen[0, 5] = (chosen[0, 5] + 1) % 5
    moved = golden.tensors["layers.0.router.probabilities"].clone()
    for share, near in ((0.45, False), (0.55, True)):
        moved[3, 2, 0] = golden.tensors["layers.0.router.probabilities"][3, 2, 0] + (
            share * margin[0, 5]
        )
        other = edited(
            golden, layers__0__router__chosen=chosen, layers__0__router__probabilities=moved
        )
        [flip] = compare(golden, other, tolerance=1.0).flips
        assert flip.near_tie == near
        assert flip.explained == pytest.approx(2 * share * float(margin[0, 5]), rel=1e-3)


def test_what_follows_a_flip_is_counted_apart(golden):
    """A token after a flip in its document is no second flip; one in another document is."""
    first, later = (golden.tensors[f"layers.{b}.router.chosen"].clone() for b in (0, 2))
    first[3, 2] = (first[3, 2] + 1) % 5
    for column in (1, 2, 9, 10, 11):  # documents of row 3: 0..9, 10, 11..19
        later[3, column] = (later[3, column] + 1) % 5
    comparison = compare(
        golden, edited(golden, layers__0__router__chosen=first, layers__2__router__chosen=later)
    )
    assert [(f.layer, f.row, f.column) for f in comparison.flips] == [
        *((0, 3, 2), (2, 3, 1), (2, 3, 10), (2, 3, 11))
    ]
    assert comparison.followed == 2


def test_contaminated_tokens_are_no_drift(golden):
    chosen = golden.tensors["layers.0.router.chosen"].clone()
    chosen[3, 2] = (chosen[3, 2] + 1) % 5
    tensors: dict[str, Tensor] = {"layers.0.router.chosen": chosen}
    for name in ("layers.0.experts.output", "layers.0.residual_experts"):
        tensors[name] = golden.tensors[name].clone()
        tensors[name][3, 2] += 1
    for name in ("layers.1.attention.k_mixed", "layers.2.residual_experts", "logits"):
        tensors[name] = golden.tensors[name].clone()
        tensors[name][3, 2:10] += 1
    comparison = compare(golden, edited(golden, **tensors))
    assert first_of(comparison) == "layers.0.router.chosen"
    assert [s.name for s in comparison.stages if s.parts] == ["layers.0.router.chosen"]
    # A token just outside what the flip reaches counts.
    for row, column in ((3, 1), (3, 10), (2, 5)):
        logits = tensors["logits"].clone()
        logits[row, column] += 1
        worst = compare(golden, edited(golden, **{**tensors, "logits": logits})).stages[-1]
        assert worst.parts
        assert (worst.row, worst.column) == (row, column)


def test_flips_that_leave_nothing_to_compare_are_said(golden):
    chosen = golden.tensors["layers.0.router.chosen"]
    comparison = compare(golden, edited(golden, layers__0__router__chosen=(chosen + 1) % 5))
    assert len(comparison.flips) == 69
    assert "logits" in comparison.uncompared
    assert comparison.stages[-1].drift is None


def test_bfloat16_flips_are_kept_apart_from_its_drift(golden):
    model = load_model(GOLDEN, torch.bfloat16)
    trace = make_trace(model)
    assert default_tolerance(golden, trace) == 5e-2
    comparison = compare(golden, trace)
    assert comparison.agrees, comparison.first
    drifts = [stage.drift for stage in comparison.stages]
    assert 1e-3 < max(drifts) < 5e-2
    assert comparison.flips
    assert all(flip.near_tie for flip in comparison.flips)
    assert compare(golden, trace, tolerance=2e-5).first.name == "layers.0.attention.input"
    # Without setting flips apart, experts' outputs differ by their own size.
    name = f"layers.{comparison.flips[0].layer}.experts.output"
    x, y = golden.tensors[name], trace.tensors[name].float()
    assert float((x - y).abs().max() / x.abs().max()) > 4 * max(drifts)


# What cannot be compared


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("at", [(0, 0), (3, 9)])
def test_values_that_are_not_finite_part(value, at, golden):
    """Even after a flip, in tokens that are not compared otherwise."""
    chosen = golden.tensors["layers.0.router.chosen"].clone()
    chosen[3, 2] = (chosen[3, 2] + 1) % 5
    logits = golden.tensors["logits"].clone()
    logits[at][7] = value
    bad = edited(golden, layers__0__router__chosen=chosen, logits=logits)
    comparison = compare(golden, bad, tolerance=1.0)
    stage = comparison.stages[-1]
    assert stage.parts
    assert "the other has values that are not finite" in stage.problem
    assert (stage.row, stage.column) == at
    json.dumps(comparison.to_json(), allow_nan=False)
    assert "the reference" in compare(bad, golden, tolerance=1.0).stages[-1].problem


def test_a_stage_of_zeros(golden):
    zero = edited(golden, logits=torch.zeros_like(golden.tensors["logits"]))
    assert compare(zero, zero).agrees
    comparison = compare(zero, golden)
    assert comparison.first.drift == math.inf
    json.dumps(comparison.to_json(), allow_nan=False)


def test_another_shape_parts(golden):
    flat = golden.tensors["layers.1.attention.q_normed"].flatten(2)
    comparison = compare(golden, edited(golden, layers__1__attention__q_normed=flat))
    assert first_of(comparison) == "layers.1.attention.q_normed"
    assert "shape [4, 20, 32], not [4, 20, 4, 8]" in comparison.first.problem


def test_another_architecture_parts_where_it_differs(golden):
    model = small_model(
        vocab_size=61, skip_expert="identity", num_hidden_layers=4, layer_types=None
    )
    comparison = compare(golden, make_trace(model, golden.probe))
    assert first_of(comparison) == "embedded"
    assert {"hidden_size", "num_hidden_layers", "skip_expert"} <= set(comparison.config_differences)
    assert comparison.extra
    assert all(name.startswith("layers.3.") for name in comparison.extra)


def test_missing_and_extra_stages_are_listed(golden):
    kept = {n: t for n, t in golden.tensors.items() if not n.endswith((".v", "chosen", "margin"))}
    kept["mine"] = torch.zeros(1)
    comparison = compare(golden, dataclasses.replace(golden, tensors=kept))
    assert comparison.agrees
    assert len(comparison.missing) == 9
    assert comparison.extra == ("mine",)
    assert len(comparison.stages) == len(stages(golden.config)) - 9


def test_other_inputs_are_refused(golden):
    probe = golden.probe
    tokens = probe.tokens.clone()
    tokens[0, 0] += 1
    other = dataclasses.replace(golden, probe=Probe(tokens, probe.positions, probe.padding_mask))
    with pytest.raises(UserError, match=r"their probe\.tokens differ"):
        compare(golden, other)


def test_nothing_in_common_is_refused(golden):
    with pytest.raises(UserError, match="no stage in common"):
        compare(golden, dataclasses.replace(golden, tensors={"mine": torch.zeros(1)}))


def test_spellings_of_a_compute_dtype(tmp_path):
    """Another name of float32 must not widen what is accepted; an unknown one is refused."""
    golden = read_trace(GOLDEN_TRACE)
    tensors = {**golden.tensors, "logits": golden.tensors["logits"] * 1.03}
    for spelled in ("torch.float32", "fp32", "F32"):
        file = tmp_path / f"{spelled}.safetensors"
        write_trace(file, dataclasses.replace(golden, dtype=spelled, tensors=tensors))
        assert not compare(golden, read_trace(file)).agrees
    write_trace(tmp_path / "odd.safetensors", dataclasses.replace(golden, dtype="float7"))
    with pytest.raises(UserError, match="float7"):
        read_trace(tmp_path / "odd.safetensors")
