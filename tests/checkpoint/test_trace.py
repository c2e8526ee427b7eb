"""Traces: the probe, what is captured, the files, and the bundled golden checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import ZayaConfig, ZayaForCausalLM

from openzaya.checkpoint.load import load_model
from openzaya.checkpoint.trace import Probe, capture, make_probe, stages
from openzaya.checkpoint.trace_compare import compare
from openzaya.checkpoint.trace_file import (
    GOLDEN,
    GOLDEN_TRACE,
    Trace,
    make_trace,
    read_trace,
    write_trace,
)
from openzaya.errors import UserError
from openzaya.kernels.attention import attend_documents
from openzaya.kernels.native.library import written_out
from openzaya.model.config import PRESETS
from openzaya.model.init import init_weights
from openzaya.model.layout import build_layout
from openzaya.model.model import Zaya
from tests.checkpoint.golden_trace import golden_model
from tests.model.helpers import TOLERANCE, small_config, small_model

VARIANTS: list[dict[str, Any]] = [
    {},
    {"attention": "standard", "router": "linear", "residual": "plain", "skip_expert": "none"},
    {"skip_expert": "identity", "tie_word_embeddings": False, "layer_types": None},
    {"num_experts": 1, "skip_expert": "none", "sliding_window": 30, "num_key_value_heads": 4},
]


@pytest.fixture(scope="module")
def golden() -> Trace:
    return read_trace(GOLDEN_TRACE, complete=True)


def documents_of(probe: Probe) -> list[tuple[int, Tensor]]:
    """Row and columns of every document."""
    found = []
    for row, (mask, document) in enumerate(zip(probe.padding_mask, probe.documents, strict=True)):
        for number in document[mask].unique():
            found.append((row, (mask & (document == number)).nonzero()[:, 0]))
    return found


def close(actual: Tensor, expected: Tensor, name: str, scale: float) -> None:
    error = float((actual.double() - expected.double()).abs().max())
    assert error <= TOLERANCE * scale, f"{name}: {error:.1e} of {scale:.1e}"


# The probe


def test_tokens_are_what_the_formula_says():
    """Oracle: the documented formula, written out for each cell of a small vocabulary."""
    config = small_config(vocab_size=11, pad_token_id=3)
    probe = make_probe(config)
    x = 123456789
    for row in range(4):
        for column in range(probe.tokens.shape[1]):
            x = 16807 * x % 2147483647
            token = x % 10
            token = token + 1 if token >= 3 else token
            real = bool(probe.padding_mask[row, column])
            assert int(probe.tokens[row, column]) == (token if real else 3)
    assert set(probe.tokens[probe.padding_mask].tolist()) == set(range(11)) - {3}


@pytest.mark.parametrize(
    ("config", "seq", "crosses"),
    [
        (small_config(sliding_window=4), 20, True),
        (small_config(sliding_window=25), 50, True),
        (small_config(sliding_window=60), 64, True),
        (small_config(sliding_window=4097), 64, False),
        (small_config(sliding_window=4, layer_types=None), 20, False),
    ],
)
def test_rows_of_the_probe(config, seq, crosses, tmp_path):
    probe = make_probe(config)
    assert probe.tokens.shape == (4, seq)
    assert [len(columns) for _, columns in documents_of(probe)] == [
        *(seq, seq - seq // 3, seq - seq // 4),
        *(seq // 2, 1, seq - seq // 2 - 1),
    ]
    assert probe.padding_mask[1, -1]
    assert not probe.padding_mask[1, 0]
    assert probe.padding_mask[2, 0]
    assert not probe.padding_mask[2, -1]
    for row, columns in documents_of(probe):
        assert probe.positions[row, columns].tolist() == list(range(len(columns)))
    write_trace(tmp_path / "t", Trace(config, "float32", probe, {}))
    with safe_open(tmp_path / "t", "pt") as handle:
        assert json.loads(handle.metadata()["crosses_window"]) == crosses


# What is captured


@pytest.mark.parametrize("changes", VARIANTS)
def test_every_stage_of_every_variant(changes):
    model = small_model(**changes)
    probe = make_probe(model.config)
    found = capture(model, probe)
    assert list(found) == list(stages(model.config))
    for name, shape in stages(model.config).items():
        assert found[name].shape == (*probe.tokens.shape, *shape), name
        assert not found[name][~probe.padding_mask].any(), name
        assert found[name].isfinite().all(), name
    assert found["layers.0.router.chosen"].dtype == torch.int64
    if "layers.0.skip" in found:
        assert found["layers.0.skip"].dtype == torch.bool
        assert found["layers.0.skip"].any()
    output = model(probe.tokens, probe.positions, probe.padding_mask)
    assert torch.equal(output.hidden, found["final_hidden"])
    load = torch.stack(
        [
            found[f"layers.{b}.router.chosen"][probe.padding_mask].bincount(
                minlength=model.config.num_router_classes
            )
            for b in range(3)
        ]
    )
    assert torch.equal(load, output.load)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", VARIANTS)
def test_stages_that_are_computed_again_are_those_of_the_forward(changes, dtype):
    """Oracle: what hooks saw of the forward itself, bit for bit, on rows without padding."""
    model = small_model(compute_dtype=dtype, **changes)
    config, whole = model.config, make_probe(model.config)
    probe = Probe(whole.tokens[[0, 3]], whole.positions[[0, 3]], whole.padding_mask[[0, 3]])
    found = capture(model, probe)
    shape = (2, probe.tokens.shape[1])
    layout = build_layout(config, shape, torch.device("cpu"), dtype, probe.positions)
    for b, kind in enumerate(config.types):
        at = f"layers.{b}.attention."
        q, k, v = found[at + "q_rotated"], found[at + "k_rotated"], found[at + "v"]
        assert q.dtype == dtype
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        with written_out():
            out = attend_documents(*heads_first, layout.starts, layout.windows[kind]).flatten(2)
        assert torch.equal(out, found[at + "context"])
        if config.attention == "standard":
            continue
        q0, k0 = found[at + "q_projected"].float(), found[at + "k_projected"].float()
        group = config.num_attention_heads // config.num_key_value_heads
        mean = (q0 + k0.repeat_interleave(group, 2)) * 0.5
        assert torch.equal(found[at + "q_convolved"] + mean, found[at + "q_mixed"])
        mean = mean.unflatten(2, (-1, group)).mean(3)
        assert torch.equal(found[at + "k_convolved"] + mean, found[at + "k_mixed"])


def test_no_hook_stays_even_after_a_failure(monkeypatch):
    model = small_model()
    hooks = lambda: [  # noqa: E731
        hook for m in model.modules() for hook in (*m._forward_hooks, *m._forward_pre_hooks)
    ]
    capture(model, make_probe(model.config))
    assert not hooks()
    monkeypatch.setattr(model.model.layers[2].self_attn, "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        capture(model, make_probe(model.config))
    assert not hooks()


@pytest.mark.parametrize("changes", VARIANTS)
def test_padded_and_packed_documents_are_those_run_alone(changes):
    """Oracle: every document of the probe without padding, without others, without positions."""
    model = small_model(**changes)
    probe = make_probe(model.config)
    found = capture(model, probe)
    for row, columns in documents_of(probe):
        length = len(columns)
        alone = capture(
            model,
            Probe(
                probe.tokens[row : row + 1, columns],
                torch.arange(length)[None],
                torch.ones(1, length, dtype=torch.bool),
            ),
        )
        for name, tensor in alone.items():
            scale = float(found[name].double().abs().max())
            close(found[name][row, columns], tensor[0], f"{name} of row {row}", scale)


# The bundle


def test_the_bundle_is_what_the_script_makes(golden):
    model, ours = load_model(GOLDEN), golden_model()
    assert model.config == ours.config == golden.config
    state = model.state_dict()
    assert state.keys() == ours.state_dict().keys()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    again = make_trace(ours)
    assert torch.equal(again.probe.tokens, golden.probe.tokens)
    comparison = compare(golden, again, 1e-5)
    assert comparison.agrees
    assert not comparison.flips
    assert len(comparison.stages) == len(stages(golden.config))
    assert sum(file.stat().st_size for file in GOLDEN.iterdir()) < 700_000


def test_the_bundle_covers_what_it_claims(golden):
    """Oracle: the claims themselves."""
    config, mask = golden.config, golden.probe.padding_mask
    assert set(config.types) == {"hybrid", "hybrid_sliding"}
    assert config.sliding_window < golden.probe.tokens.shape[1] // 2
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    for b in range(config.num_hidden_layers):
        chosen = golden.tensors[f"layers.{b}.router.chosen"][mask]
        # All experts and the skip class in every layer, by margins far above rounding in fp32.
        assert min(chosen.bincount(minlength=5).tolist()) >= 4
        assert float(golden.tensors[f"layers.{b}.router.margin"][mask].min()) > 2e-3
        assert float(golden.tensors[f"layers.{b}.router.weight"][mask].min()) > 0
    fresh = Zaya(config)
    init_weights(fresh, 0)
    defaults = fresh.state_dict()
    for name, tensor in golden_model().state_dict().items():
        assert (tensor != defaults[name]).float().mean() > 0.9, name


def test_the_bundle_is_what_transformers_computes(golden):
    """Oracle: `ZayaForCausalLM` on every document alone, its modules hooked."""
    oracle = ZayaForCausalLM(ZayaConfig.from_pretrained(GOLDEN, attn_implementation="eager")).eval()
    # from_pretrained would reset the skip class's balancing bias.
    problems = oracle.load_state_dict(load_file(GOLDEN / "model.safetensors"), strict=False)
    assert problems == (["lm_head.weight"], [])
    tensors: dict[str, Tensor] = {}
    for row, columns in documents_of(golden.probe):
        for name, value in hooked(oracle, golden.probe.tokens[row : row + 1, columns]).items():
            like = golden.tensors[name]
            whole = tensors.setdefault(name, torch.zeros_like(like))
            whole[row, columns] = value.reshape(len(columns), *like.shape[2:]).to(like.dtype)
    for b in range(3):  # its weight of the skip class is zero, where ours is the probability
        weight, skip = f"layers.{b}.router.weight", golden.tensors[f"layers.{b}.skip"]
        assert not tensors[weight][skip].any()
        tensors[weight] += golden.tensors[weight] * skip
    comparison = compare(golden, Trace(golden.config, "float32", golden.probe, tensors))
    assert comparison.agrees, comparison.first
    assert not comparison.flips
    missing = ("_convolved", "_rotated", "context", "margin", "skip")
    assert {name for name in comparison.missing if not name.endswith(missing)} == set()
    assert len(comparison.stages) == 4 - 1 + 3 * 17


@torch.no_grad()
def hooked(oracle: ZayaForCausalLM, tokens: Tensor) -> dict[str, Tensor]:
    """What the modules of transformers' model show of one document."""
    found: dict[str, Tensor] = {}
    handles = []

    def after(module: torch.nn.Module, use: Callable[[Any], dict[str, Tensor]]) -> None:
        hook = lambda _, __, result: found.update(use(result))  # noqa: E731
        handles.append(module.register_forward_hook(hook))

    def watch(layer: Any, at: str) -> None:
        attention, classes = layer.self_attn, layer.mlp.gate.num_router_classes

        def routed(result: tuple[Tensor, ...]) -> dict[str, Tensor]:
            logits, weight, index, state = result
            chosen = index.masked_fill(weight == 0, classes - 1)
            return {
                at + "router.probabilities": logits.softmax(-1),
                at + "router.chosen": chosen,
                at + "router.weight": weight,
                at + "router.state": state,
            }

        after(layer.input_layernorm, lambda x: {at + "attention.input": x})
        after(attention.qkv_proj.q_proj, lambda x: {at + "attention.q_projected": x})
        after(attention.qkv_proj.k_proj, lambda x: {at + "attention.k_projected": x})
        mixed = [at + f"attention.{name}" for name in ("q_mixed", "k_mixed", "v")]
        after(attention.qkv_proj, lambda x: dict(zip(mixed, x, strict=True)))
        normed = [at + f"attention.{name}_normed" for name in "qk"]
        after(attention.qk_norm, lambda x: dict(zip(normed, x, strict=True)))
        after(attention, lambda x: {at + "attention.output": x[0]})
        after(layer.post_attention_residual_scale, lambda x: {at + "residual_attention": x})
        after(layer.post_attention_layernorm, lambda x: {at + "router.input": x})
        after(layer.mlp.gate, routed)
        after(layer.mlp, lambda x: {at + "experts.output": x[0]})
        after(layer.post_mlp_residual_scale, lambda x: {at + "residual_experts": x})

    first = oracle.model.layers[0]
    handles.append(first.register_forward_pre_hook(lambda _, args: found.update(embedded=args[0])))
    for b, layer in enumerate(oracle.model.layers):
        watch(layer, f"layers.{b}.")
    after(oracle.model.norm, lambda x: {"final_hidden": x})
    found["logits"] = oracle(tokens, use_cache=False).logits
    for handle in handles:
        handle.remove()
    return found


# Files


def test_what_is_written_is_read(tmp_path):
    model = small_model(compute_dtype=torch.bfloat16)
    trace = make_trace(model)
    assert trace.tensors["layers.0.attention.input"].dtype == torch.bfloat16
    write_trace(tmp_path / "new" / "trace.safetensors", trace)
    again = read_trace(tmp_path / "new" / "trace.safetensors", complete=True)
    assert (again.config, again.dtype) == (model.config, "bfloat16")
    assert again.tensors.keys() == trace.tensors.keys()
    for name, tensor in trace.tensors.items():
        assert torch.equal(tensor, again.tensors[name])
        assert tensor.dtype == again.tensors[name].dtype
    for name in ("tokens", "positions", "padding_mask"):
        assert torch.equal(getattr(trace.probe, name), getattr(again.probe, name))
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["trace.safetensors"]
    for again in range(3):  # the same trace is the same bytes
        write_trace(tmp_path / str(again), trace)
        content = (tmp_path / "new" / "trace.safetensors").read_bytes()
        assert (tmp_path / str(again)).read_bytes() == content


def test_nothing_half_written_stays(tmp_path, monkeypatch, golden):
    file = tmp_path / "trace.safetensors"
    write_trace(file, golden)
    old = file.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("openzaya.checkpoint.atomic.sync", full)
    with pytest.raises(UserError, match="No space left"):
        write_trace(file, golden)
    assert [f.name for f in tmp_path.iterdir()] == [file.name]
    assert file.read_bytes() == old


def test_a_file_that_is_no_trace_is_not_replaced(tmp_path, golden):
    """Such as the weights of the very model that was traced."""
    weights = GOLDEN / "model.safetensors"
    for name, content in (("text", b"old"), ("weights", weights.read_bytes())):
        file = tmp_path / name
        file.write_bytes(content)
        with pytest.raises(UserError, match="exists and is no trace"):
            write_trace(file, golden)
        assert file.read_bytes() == content


BROKEN: dict[str, tuple[Callable[[dict[str, Tensor], dict[str, str]], object], str]] = {
    "other": (lambda t, m: m.pop("format"), "is no trace"),
    "version": (lambda t, m: m.update(version="9"), "version '9'"),
    "config": (lambda t, m: m.update(config="{}"), "does not describe a model"),
    "json": (lambda t, m: m.update(config="{"), "does not describe a model"),
    "probe": (lambda t, m: t.pop("probe.positions"), "probe.positions is missing"),
    "shape": (
        lambda t, m: t.update({"probe.positions": t["probe.tokens"][:2] + 0}),
        "probe.positions",
    ),
    "ids": (lambda t, m: t.update({"probe.tokens": torch.zeros(4, 20)}), "whole numbers"),
    "stage": (lambda t, m: t.pop("layers.1.attention.v"), "layers.1.attention.v is missing"),
    "width": (lambda t, m: t.update(logits=t["logits"][..., 1:].clone()), "logits has shape"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_bad_files_are_named(case, tmp_path):
    tensors, metadata = load_file(GOLDEN_TRACE), {"format": "openzaya-trace", "version": "1"}
    metadata["config"] = golden_model().config.model_dump_json()
    breaks, message = BROKEN[case]
    breaks(tensors, metadata)
    file = tmp_path / "bad.safetensors"
    save_file(tensors, file, metadata)
    with pytest.raises(UserError, match=message) as error:
        read_trace(file, complete=True)
    assert str(file) in str(error.value)


def test_files_that_cannot_be_opened(tmp_path):
    with pytest.raises(UserError, match="is no file"):
        read_trace(tmp_path / "nowhere")
    content = GOLDEN_TRACE.read_bytes()
    for length in (0, 5, 1000, len(content) - 1):
        (tmp_path / "cut").write_bytes(content[:length])
        with pytest.raises(UserError, match="damaged"):
            read_trace(tmp_path / "cut")
    save_file({"x": torch.zeros(1)}, tmp_path / "weights")
    with pytest.raises(UserError, match="is no trace"):
        read_trace(tmp_path / "weights")


def test_a_probe_of_a_larger_vocabulary_is_refused():
    model = small_model(vocab_size=20)
    with pytest.raises(UserError, match="vocabulary is 20"):
        make_trace(model, make_probe(PRESETS["tiny"]))
