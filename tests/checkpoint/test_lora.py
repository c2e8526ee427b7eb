"""Adapter files: PEFT is the oracle of the native ones, the table of names of the legacy ones."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import ZayaConfig

from openzaya.checkpoint.lora import Adapter, read_adapter, write_adapter
from openzaya.checkpoint.tensors import entries
from openzaya.errors import UserError
from openzaya.model.lora import (
    Pair,
    attach,
    attached,
    detach,
    is_dora,
    kept,
    merge,
    new_adapter,
    scale_of,
    with_magnitudes,
)
from openzaya.model.model import Zaya
from tests.model.helpers import small_config
from tests.oracle import our_config, pair, random_geometry, random_tokens, relative_error

TOLERANCE = 2e-5
ATTENTION = ["q_proj", "k_proj", "v_proj_current", "v_proj_delayed", "o_proj"]
ROUTER = ["gate.down_proj", "fc1", "fc2", "out_proj"]
STACKS = ["experts.gate_up_proj", "experts.down_proj"]
PREFIX = "base_model.model."
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning"
)


@pytest.fixture(scope="module")
def geometry() -> ZayaConfig:
    """Three layers, four experts, and a square down projection."""
    config = random_geometry(7)
    assert config.num_hidden_layers == 3
    assert config.moe_intermediate_size == config.hidden_size
    return config


def randomise_pairs(tensors: list[Tensor]) -> None:
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(0.2 * torch.randn(tensor.shape, generator=generator))


@torch.no_grad()
def logits_of(model: Zaya, tokens: Tensor) -> Tensor:
    return model.logits(model(tokens).hidden)


def full_adapter(config: Any, rank: int = 2, **changes: Any) -> Adapter:
    adapter = new_adapter(config, ["attention", "experts", "router"], rank, alpha=3.0, **changes)
    randomise_pairs([pair.b for pair in adapter.pairs.values()])
    return adapter


CASES: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ATTENTION},
    "router": {"target_modules": ROUTER},
    "all linear maps": {"target_modules": "all-linear"},
    "gate and up": {"target_modules": [], "target_parameters": STACKS[:1]},
    "down": {"target_modules": [], "target_parameters": STACKS[1:]},
    "experts": {"target_modules": [], "target_parameters": STACKS},
    "weights by parameter": {
        "target_modules": ["k_proj"],
        "target_parameters": ["gate.down_proj.weight", "layers.1.mlp.experts.down_proj"],
        "rank_pattern": {"down_proj": 1, "gate.down_proj.weight": 4},
    },
    "some experts nested": {
        "target_modules": ["o_proj"],
        "target_parameters": ["layers.0.mlp.experts.gate_up_proj", "experts.down_proj"],
    },
    "everything": {"target_modules": ATTENTION + ROUTER, "target_parameters": STACKS},
    "patterns": {
        "target_modules": ATTENTION + ROUTER,
        "target_parameters": STACKS,
        # In alphabetical order, in which PEFT saves them: the first that matches counts.
        "rank_pattern": {"experts.gate_up_proj": 1, r"layers\.1\..*_proj": 2, "q_proj": 5},
        "alpha_pattern": {"fc1": 11, r".*\.0\.mlp\.experts\.down_proj": 2},
    },
    "rank-stabilised": {
        "target_modules": ATTENTION,
        "target_parameters": STACKS,
        "use_rslora": True,
        "rank_pattern": {"k_proj": 2},
        "alpha_pattern": {"down_proj": 7},
    },
    "one layer": {"target_modules": ["q_proj", "o_proj"], "layers_to_transform": [1]},
    "by expression": {"target_modules": r".*\.2\.self_attn\..*(q|o)_proj"},
    "magnitudes": {"target_modules": ATTENTION + ROUTER, "use_dora": True},
    "magnitudes of stabilised": {
        "target_modules": ["o_proj", "fc1"],
        "use_dora": True,
        "use_rslora": True,
        "rank_pattern": {"fc1": 5},
    },
}


@pytest.mark.parametrize("case", CASES)
def test_adapters_of_peft_compute_the_same_here(
    case: str, geometry: ZayaConfig, tmp_path: Path
) -> None:
    oracle, ours = pair(geometry, seed=3)
    settings = LoraConfig(r=3, lora_alpha=5, task_type="CAUSAL_LM", **CASES[case])
    adapted = get_peft_model(oracle, settings).eval()
    randomise_pairs([p for name, p in adapted.named_parameters() if re.search("lora_[AB]", name)])
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "magnitude" in name:
                p.mul_(torch.linspace(0.5, 1.5, len(p)))
    adapted.save_pretrained(str(tmp_path))
    adapter = read_adapter(tmp_path, ours.config)
    tokens = random_tokens(geometry, 2, 9)
    base = logits_of(ours, tokens)
    attach(ours, adapter)
    kept = logits_of(ours, tokens)
    detach(ours)
    assert torch.equal(logits_of(ours, tokens), base)
    merge(ours, adapter)
    merged = logits_of(ours, tokens)
    with torch.no_grad():
        expected = adapted(tokens).logits
        expected_merged = adapted.merge_and_unload()(tokens).logits
    assert relative_error(base, expected) > 1e-2
    assert relative_error(kept, expected) < TOLERANCE
    assert relative_error(merged, expected_merged) < TOLERANCE


def test_gradients_of_magnitudes_and_factors_are_those_of_peft(
    geometry: ZayaConfig, tmp_path: Path
) -> None:
    """DoRA's norm counts as a constant, here as there."""
    oracle, ours = pair(geometry, seed=3)
    settings = LoraConfig(
        r=3, lora_alpha=5, task_type="CAUSAL_LM", use_dora=True, target_modules=ATTENTION + ROUTER
    )
    adapted = get_peft_model(oracle, settings)
    randomise_pairs([p for name, p in adapted.named_parameters() if re.search("lora_[AB]", name)])
    adapted.save_pretrained(str(tmp_path))
    adapter = read_adapter(tmp_path, ours.config)
    assert is_dora(adapter)
    ours.requires_grad_(False)
    attach(ours, adapter)
    tokens = random_tokens(geometry, 2, 9)
    adapted(tokens).logits.square().sum().backward()
    ours.logits(ours(tokens).hidden).square().sum().backward()
    theirs = dict(adapted.named_parameters())
    for name, _, _, change in kept(ours):
        stem = PREFIX + name.removesuffix(".weight")
        assert change.magnitude is not None
        for key, mine in (
            ("lora_A.default.weight", change.a),
            ("lora_B.default.weight", change.b),
            ("lora_magnitude_vector.default.weight", change.magnitude),
        ):
            assert relative_error(mine.grad, theirs[f"{stem}.{key}"].grad) < 1e-4, (name, key)


def test_a_fresh_adapter_with_magnitudes_changes_nothing_and_peft_opens_it(
    geometry: ZayaConfig, tmp_path: Path
) -> None:
    oracle, ours = pair(geometry, seed=3)
    tokens = random_tokens(geometry, 2, 9)
    base = logits_of(ours, tokens)
    fresh = new_adapter(ours.config, ["attention", "router"], 2, 3.0)
    adapter = with_magnitudes(fresh, ours)
    attach(ours, adapter)
    assert relative_error(logits_of(ours, tokens), base) < 1e-5
    detach(ours)
    for layout in ("native", "legacy"):
        write_adapter(adapter, tmp_path / layout, ours.config, layout)
        check_same(read_adapter(tmp_path / layout, ours.config), adapter)
    randomise_pairs([pair.b for pair in adapter.pairs.values()])
    write_adapter(adapter, tmp_path / "changed", ours.config)
    attach(ours, adapter)
    with torch.no_grad():
        expected = PeftModel.from_pretrained(oracle, str(tmp_path / "changed"))(tokens).logits
    assert relative_error(logits_of(ours, tokens), expected) < TOLERANCE
    assert relative_error(expected, base) > 1e-2
    kept_pairs = attached(ours)
    name = next(iter(kept_pairs))
    assert torch.equal(kept_pairs[name].magnitude, adapter.pairs[name].magnitude)
    detach(ours)
    stacks = new_adapter(ours.config, ["experts"], 2, 3.0)
    with pytest.raises(UserError, match="cannot be adapted by DoRA"):
        with_magnitudes(stacks, ours)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {n: x for n, x in t.items() if "magnitude" not in n}, "magnitude_vector is mis"),
        (lambda t: {n: x[:-1] if "magnitude" in n else x for n, x in t.items()}, "has shape"),
        (lambda t: {n: x * float("nan") for n, x in t.items()}, "not finite"),
    ],
)
def test_damaged_magnitudes_are_named(change: Any, message: str, tmp_path: Path) -> None:
    config = small_config()
    ours = Zaya(config)
    adapter = with_magnitudes(new_adapter(config, ["attention"], 2, 3.0), ours)
    write_adapter(adapter, tmp_path, config)
    edit(tmp_path, change)
    with pytest.raises(UserError, match=message):
        read_adapter(tmp_path, config)
    write_adapter(adapter, tmp_path, config)
    configure(tmp_path, lambda settings: {**settings, "use_dora": False})
    with pytest.raises(UserError, match="use_dora is off"):
        read_adapter(tmp_path, config)


@pytest.mark.parametrize(
    ("targets", "rslora"),
    [
        (["attention", "experts", "router"], True),
        (["attention", "experts", "router"], False),
        (["experts.gate_up_proj"], False),
        (["experts.down_proj", "model.layers.1.mlp.experts.gate_up_proj"], False),
        (["o_proj.weight"], False),
    ],
)
def test_peft_opens_ours(
    targets: list[str], rslora: bool, geometry: ZayaConfig, tmp_path: Path
) -> None:
    oracle, ours = pair(geometry, seed=3)
    adapter = new_adapter(ours.config, targets, rank=3, alpha=2.5, use_rslora=rslora)
    adapter.base_model = "somebody/a-model"
    for i, (name, low_rank) in enumerate(adapter.pairs.items()):
        if i % 3 == 1:  # another rank, another numerator
            wider = new_adapter(ours.config, [name], rank=5, alpha=1.7, use_rslora=rslora)
            adapter.pairs[name] = wider.pairs[name]
        elif i % 3 == 2:
            low_rank.scale = scale_of(3, 7.3, rslora)
    randomise_pairs([low_rank.b for low_rank in adapter.pairs.values()])
    folder = tmp_path / "adapter"
    write_adapter(adapter, folder, ours.config)
    tokens = random_tokens(geometry, 2, 9)
    attach(ours, adapter)
    adapted = PeftModel.from_pretrained(oracle, str(folder)).eval()
    stored = load_file(folder / WEIGHTS)
    state = adapted.state_dict()
    for name, tensor in stored.items():
        inside = name.replace(".lora_A.", ".lora_A.default.").replace(
            ".lora_B.", ".lora_B.default."
        )
        assert torch.equal(state[inside], tensor)
    assert len([name for name in state if ".lora_" in name]) == len(stored)
    with torch.no_grad():
        assert relative_error(logits_of(ours, tokens), adapted(tokens).logits) < TOLERANCE
    check_same(read_adapter(folder, ours.config), adapter)


def check_same(one: Adapter, two: Adapter) -> None:
    assert list(one.pairs) == list(two.pairs)
    for name, first in one.pairs.items():
        second = two.pairs[name]
        assert first.scale == second.scale, name
        assert (first.magnitude is None) == (second.magnitude is None)
        sides = [(first.a, second.a), (first.b, second.b)]
        if first.magnitude is not None and second.magnitude is not None:
            sides.append((first.magnitude, second.magnitude))
        for a, b in sides:
            assert a.dtype == b.dtype
            assert torch.equal(a, b), name
    kept = ("rank", "alpha", "use_rslora", "base_model")
    assert [getattr(one, key) for key in kept] == [getattr(two, key) for key in kept]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_round_trip_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    config = small_config()
    adapter = full_adapter(config, rank=3, use_rslora=True)
    for i, low_rank in enumerate(adapter.pairs.values()):
        low_rank.a, low_rank.b = low_rank.a.to(dtype), low_rank.b.to(dtype)
        low_rank.scale = scale_of(3, 0.1 + i / 7, True)
    write_adapter(adapter, tmp_path / "native", config)
    write_adapter(read_adapter(tmp_path / "native", config), tmp_path / "old", config, "legacy")
    back = read_adapter(tmp_path / "old", config)
    check_same(back, adapter)
    write_adapter(back, tmp_path / "again", config)
    for file in (CONFIG, WEIGHTS):
        first, second = ((tmp_path / name / file).read_bytes() for name in ("native", "again"))
        assert first == second


def test_legacy_names_are_those_of_the_table(tmp_path: Path) -> None:
    config = small_config()
    adapter = full_adapter(config)
    write_adapter(adapter, tmp_path / "old", config, "legacy")
    tensors = load_file(tmp_path / "old" / WEIGHTS)
    for entry in entries(config):
        if entry.native not in adapter.pairs:
            continue
        low_rank = adapter.pairs[entry.native]
        for i, name in enumerate(entry.legacy):
            module = PREFIX + name.removesuffix(".weight")
            a, b = tensors.pop(f"{module}.lora_A.weight"), tensors.pop(f"{module}.lora_B.weight")
            delta = low_rank.delta()[i] if entry.row.stacked else low_rank.delta()
            assert relative_error(low_rank.scale * b @ a, delta) < 1e-6
    assert not tensors


ALIASES = {
    ".self_attn.qkv.": ".self_attn.cca.",
    ".zaya_block.router.": ".router.",
    ".zaya_block.experts.": ".moe.experts.",
}


def test_aliases_of_legacy_names(tmp_path: Path) -> None:
    config = small_config()
    adapter = full_adapter(config)
    write_adapter(adapter, tmp_path / "old", config, "legacy")

    def renamed(text: str) -> str:
        for name, alias in ALIASES.items():
            text = text.replace(name, alias)
        return text

    edit(tmp_path / "old", lambda tensors: {renamed(n): t for n, t in tensors.items()})
    configure(tmp_path / "old", lambda text: json.loads(renamed(json.dumps(text))))
    check_same(read_adapter(tmp_path / "old", config), adapter)


@pytest.mark.parametrize("layout", ["native", "legacy"])
def test_output_projections_of_some_blocks_may_be_either(layout: Any, tmp_path: Path) -> None:
    config = small_config(num_hidden_layers=5, layer_types=None)
    names = [
        f"model.layers.{b}.self_attn.o_proj.weight" for b in ((0, 2), (0, 1))[layout != "native"]
    ]
    adapter = new_adapter(config, names, rank=2, alpha=2)
    folder = tmp_path / "adapter"
    write_adapter(adapter, folder, config, layout)
    check_same(read_adapter(folder, config), adapter)  # our writer marks it
    edit(folder, lambda tensors: tensors)
    with pytest.raises(UserError, match=r"layers\.2\.self_attn\.o_proj.*layout"):
        read_adapter(folder, config)
    check_same(read_adapter(folder, config, layout), adapter)


def test_names_tell_the_layout_where_they_can(tmp_path: Path) -> None:
    config = small_config()
    adapter = new_adapter(config, ["o_proj.weight"], rank=2, alpha=2)
    for layout in ("native", "legacy"):
        write_adapter(adapter, tmp_path / layout, config, layout)
        edit(tmp_path / layout, lambda tensors: tensors)
        check_same(read_adapter(tmp_path / layout, config), adapter)


def test_the_classic_alternatives_have_native_names_only(tmp_path: Path) -> None:
    config = small_config(attention="standard", router="linear", residual="plain")
    adapter = full_adapter(config)
    write_adapter(adapter, tmp_path / "native", config)
    check_same(read_adapter(tmp_path / "native", config), adapter)
    with pytest.raises(UserError, match="legacy"):
        write_adapter(adapter, tmp_path / "legacy", config, "legacy")
    assert not (tmp_path / "legacy").exists()


Tensors = dict[str, Tensor]


def edit(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    """Rewrite the tensors of a file, as another tool would: without our mark of the layout."""
    tensors = change(load_file(folder / WEIGHTS))
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / WEIGHTS)


def configure(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file = folder / CONFIG
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One whole adapter in both layouts."""
    config = small_config()
    folder = tmp_path_factory.mktemp("adapters")
    adapter = full_adapter(config)
    for layout in ("native", "legacy"):
        write_adapter(adapter, folder / layout, config, layout)
    return {layout: folder / layout for layout in ("native", "legacy")}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"peft_type": "IA3"}, "peft_type.*IA3"),
        ({"peft_type": None}, "peft_type"),
        ({"use_dora": True}, r"lora_magnitude_vector is missing"),
        ({"lora_bias": True}, "lora_bias"),
        ({"bias": "all"}, "bias.*all"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights.*pissa"),
        ({"r": 0}, r"\br\b"),
        ({"r": "4"}, r"\br\b"),
        ({"r": 3}, r"lora_A\.weight.*rank is 2, but 3"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"lora_alpha": [1]}, "lora_alpha"),
        ({"rank_pattern": {"q_proj": 3}}, r"q_proj\.lora_A\.weight.*rank is 2, but 3"),
        ({"rank_pattern": {"q_proj": -1}}, r"rank_pattern\.q_proj"),
        ({"rank_pattern": {"experts.down_proj": 1}}, r"experts\.lora_A\.weight.*rank is 2, but 1"),
        ({"alpha_pattern": {"(": 1}}, "regular expression"),
        ({"alpha_pattern": 3}, "alpha_pattern"),
        ({"target_modules": ["q_proj", "v_proj"]}, "v_proj"),
        ({"target_parameters": ["experts.up_proj"]}, "target_parameters"),
        ({"target_parameters": [*STACKS, "experts.up_proj"]}, r"experts\.up_proj"),
        ({"target_parameters": STACKS[1:]}, r"experts\.base_layer\.lora_A.*target_parameters"),
        ({"target_parameters": None}, "target_parameters"),
        ({"peft_version": "0.18.0"}, r"experts.*0\.19\.1.*0\.18\.0"),
    ],
)
def test_refused_settings_are_named(
    changes: dict[str, Any], named: str, stored: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(stored["native"], tmp_path / "adapter")
    configure(folder, lambda settings: {**settings, **changes})
    with pytest.raises(UserError, match=named):
        read_adapter(folder, small_config())


@pytest.mark.parametrize(
    "changes",
    [
        {"layers_to_transform": [0, 1, 2], "layers_pattern": "layers", "lora_dropout": 0.1},
        {"init_lora_weights": "gaussian", "inference_mode": False, "loftq_config": {}},
        {"peft_version": None, "revision": "main", "something_new": 1},
        {"target_modules": ".*"},
        {"rank_pattern": {"q_proj": 2, "no_such": 9}, "alpha_pattern": None, "bias": None},
    ],
)
def test_harmless_settings(
    changes: dict[str, Any], stored: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(stored["native"], tmp_path / "adapter")
    configure(folder, lambda settings: {**settings, **changes})
    config = small_config()
    check_same(read_adapter(folder, config), read_adapter(stored["native"], config))


Q = PREFIX + "model.layers.0.self_attn.qkv_proj.q_proj"
OUTER, INNER = (PREFIX + f"model.layers.1.mlp.experts{nesting}" for nesting in ("", ".base_layer"))
OLD_Q = PREFIX + "model.layers.2.self_attn.qkv.linear_q"
OLD_EXPERT = PREFIX + "model.layers.3.zaya_block.experts.local_experts.2.linear_fc1"


def without(*ends: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: t for n, t in tensors.items() if not n.startswith(ends)}


def added(name: str, *shape: int) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: torch.zeros(shape)}


def replaced(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: change(tensors[name])}


def with_infinity(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor[-1, -1] = float("inf")
    return tensor


TENSOR_CASES: list[tuple[str, Callable[[Tensors], Tensors], str]] = [
    ("native", without(f"{Q}.lora_B"), rf"{Q}\.lora_B\.weight is missing"),
    ("native", without(f"{OUTER}.lora_A"), rf"{OUTER}\.lora_A\.weight is missing"),
    ("native", without(f"{Q}."), r"layers\.0\.self_attn\.qkv_proj\.q_proj"),
    ("native", without(f"{INNER}."), r"model\.layers\.1\.mlp\.experts\.gate_up_proj"),
    ("native", without(PREFIX), "empty"),
    ("native", added(f"{Q}.lora_magnitude_vector", 64), "lora_magnitude_vector"),
    ("native", added(f"{Q}.lora_B.bias", 64), r"lora_B\.bias"),
    ("native", added(PREFIX + "model.embed_tokens.lora_embedding_A", 2, 61), "embed_tokens"),
    ("native", added(PREFIX + "model.embed_tokens.weight", 61, 32), "embed_tokens"),
    ("native", added(PREFIX + "model.norm.lora_A.weight", 2, 32), r"model\.norm\.lora_A"),
    (
        "native",
        added(PREFIX + "model.layers.0.self_attn.qkv_proj.conv_qk_grouped.lora_A.weight", 2, 16, 2),
        "conv_qk_grouped.*cannot be adapted",
    ),
    ("native", added(PREFIX + "model.layers.9.self_attn.o_proj.lora_A.weight", 2, 64), "layers.9"),
    ("native", added(f"{Q}.base_layer.lora_A.weight", 2, 32), r"q_proj\.base_layer"),
    ("native", added(f"{INNER}.base_layer.lora_A.weight", 8, 32), r"base_layer\.base_layer"),
    ("native", added("model.layers.0.self_attn.o_proj.lora_A.weight", 2, 64), "o_proj"),
    ("native", replaced(f"{Q}.lora_A.weight", lambda t: t[:, 1:]), rf"{Q}\.lora_A.*\[2, 31\]"),
    ("native", replaced(f"{Q}.lora_B.weight", lambda t: t[1:]), rf"{Q}\.lora_B.*\[63, 2\]"),
    ("native", replaced(f"{Q}.lora_A.weight", lambda t: t[0]), rf"{Q}\.lora_A.*\[32\]"),
    ("native", replaced(f"{Q}.lora_A.weight", lambda t: t[:1]), rf"{Q}\.lora_A.*rank is 1"),
    ("native", replaced(f"{OUTER}.lora_A.weight", lambda t: t[:7]), rf"{OUTER}\.lora_A.*\[7, 24\]"),
    ("native", replaced(f"{OUTER}.lora_B.weight", lambda t: t[:, :4]), "lora_B.*rank is 1"),
    ("native", replaced(f"{Q}.lora_B.weight", with_infinity), rf"{Q}\.lora_B.*not finite"),
    ("native", replaced(f"{Q}.lora_B.weight", torch.Tensor.int), rf"{Q}\.lora_B.*int32"),
    (
        "native",
        replaced(f"{Q}.lora_B.weight", lambda t: t.to(torch.float8_e4m3fn)),
        rf"{Q}\.lora_B.*float8",
    ),
    ("native", added(f"{OLD_Q}.lora_A.weight", 2, 32), "linear_q"),
    ("legacy", added(f"{Q}.lora_A.weight", 2, 32), "qkv_proj"),
    ("legacy", without(f"{OLD_Q}.lora_A"), rf"{OLD_Q}\.lora_A\.weight is missing"),
    ("legacy", without(f"{OLD_EXPERT}.lora_B"), rf"{OLD_EXPERT}\.lora_B\.weight is missing"),
    ("legacy", added(OLD_Q.replace("qkv.", "cca.") + ".lora_A.weight", 2, 32), "same matrix"),
    ("legacy", replaced(f"{OLD_EXPERT}.lora_A.weight", lambda t: t[:1]), "rank is 1, but 2"),
]


@pytest.mark.parametrize(("layout", "change", "named"), TENSOR_CASES)
def test_refused_tensors_are_named(
    layout: str,
    change: Callable[[Tensors], Tensors],
    named: str,
    stored: dict[str, Path],
    tmp_path: Path,
) -> None:
    folder = shutil.copytree(stored[layout], tmp_path / "adapter")
    edit(folder, change)
    with pytest.raises(UserError, match=named):
        read_adapter(folder, small_config())


def test_all_experts_of_a_matrix_or_none(stored: dict[str, Path], tmp_path: Path) -> None:
    config = small_config()
    folder = shutil.copytree(stored["legacy"], tmp_path / "adapter")
    edit(folder, without(f"{OLD_EXPERT}."))
    configure(folder, lambda settings: {**settings, "target_modules": None})
    with pytest.raises(UserError, match=rf"{OLD_EXPERT}\.lora_A\.weight is missing.*all must"):
        read_adapter(folder, config)
    every = OLD_EXPERT.replace("2.linear_fc1", "")
    edit(folder, lambda t: {n: x for n, x in t.items() if not (every in n and "fc1" in n)})
    pairs = read_adapter(folder, config).pairs
    assert "model.layers.1.mlp.experts.gate_up_proj" not in pairs
    assert "model.layers.1.mlp.experts.down_proj" in pairs


@pytest.mark.parametrize("pattern", ["rank_pattern", "alpha_pattern"])
def test_experts_must_agree(pattern: str, stored: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(stored["legacy"], tmp_path / "adapter")
    configure(folder, lambda settings: {**settings, pattern: {r"local_experts\.2\.linear_fc1": 1}})
    if pattern == "rank_pattern":
        for layer in (1, 3, 5):
            part = OLD_EXPERT.replace("layers.3", f"layers.{layer}")
            edit(folder, replaced(f"{part}.lora_A.weight", lambda t: t[:1]))
            edit(folder, replaced(f"{part}.lora_B.weight", lambda t: t[:, :1]))
    with pytest.raises(UserError, match=r"experts\.2\.linear_fc1 has another"):
        read_adapter(folder, small_config())


def test_square_stacks_without_a_version_are_refused(tmp_path: Path) -> None:
    config = small_config(moe_intermediate_size=32)
    adapter = full_adapter(config)
    write_adapter(adapter, tmp_path / "adapter", config)
    check_same(read_adapter(tmp_path / "adapter", config), adapter)
    configure(tmp_path / "adapter", lambda settings: {**settings, "peft_version": None})
    with pytest.raises(UserError, match="peft_version"):
        read_adapter(tmp_path / "adapter", config)


def test_missing_and_damaged_files(stored: dict[str, Path], tmp_path: Path) -> None:
    config = small_config()
    with pytest.raises(UserError, match=CONFIG):
        read_adapter(tmp_path / "nothing", config)
    folder = shutil.copytree(stored["native"], tmp_path / "adapter")
    whole = (folder / WEIGHTS).read_bytes()
    for size in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        (folder / WEIGHTS).write_bytes(whole[:size])
        with pytest.raises(UserError, match=f"{WEIGHTS} is damaged"):
            read_adapter(folder, config)
    (folder / WEIGHTS).unlink()
    with pytest.raises(UserError, match=f"{WEIGHTS} is missing"):
        read_adapter(folder, config)
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UserError, match=r"adapter_model\.bin, a pickle"):
        read_adapter(folder, config)
    for text in ("", "{", "[]", "\udcff"):
        (folder / CONFIG).write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(UserError, match=CONFIG):
            read_adapter(folder, config)


def test_another_model_is_refused(stored: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="lora_"):
        read_adapter(stored["native"], small_config(hidden_size=48))
    with pytest.raises(UserError, match=r"layers\.2"):
        read_adapter(stored["native"], small_config(num_hidden_layers=2, layer_types=None))
    with pytest.raises(UserError, match="lora_"):
        read_adapter(stored["native"], small_config(num_experts=8))


def test_writing_checks_first(tmp_path: Path) -> None:
    config = small_config()
    good = full_adapter(config)
    name = "model.layers.1.self_attn.o_proj.weight"
    folder = tmp_path / "adapter"
    for pair_, key in (
        (Pair(torch.zeros(2, 64), torch.full((32, 2), float("nan")), 1.0), name),
        (Pair(torch.zeros(2, 65), torch.zeros(32, 2), 1.0), name),
        (Pair(torch.zeros(2, 64), torch.zeros(32, 2), 1.0), name.replace("1", "8")),
        (Pair(torch.zeros(2, 32), torch.zeros(61, 2), 1.0), "model.embed_tokens.weight"),
    ):
        adapter = copy.copy(good)
        adapter.pairs = {**good.pairs, key: pair_}
        with pytest.raises(UserError, match=key):
            write_adapter(adapter, folder, config)
        assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="nothing"):
        write_adapter(Adapter({}, 2, 2.0), folder, config)


def test_only_adapters_are_replaced(tmp_path: Path) -> None:
    config = small_config()
    adapter = full_adapter(config)
    folder = tmp_path / "adapter"
    folder.mkdir()
    write_adapter(adapter, folder, config)
    write_adapter(adapter, folder, config)
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("keep me")
    with pytest.raises(UserError, match="not replaced"):
        write_adapter(adapter, other, config)
    assert (other / "notes.txt").read_text() == "keep me"


def test_the_oracle_has_our_shapes(geometry: ZayaConfig) -> None:
    """The cases above would prove little if experts were few or all alike."""
    config = our_config(geometry)
    assert config.num_experts == 4
    assert config.num_hidden_layers == 3
