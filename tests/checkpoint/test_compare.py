"""Are two checkpoints one model? Each thing that converters do to tensors is named."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from openzaya.checkpoint.atomic import atomic_folder
from openzaya.checkpoint.compare import (
    check_data,
    compare,
    compare_logits,
    open_for_reading,
    probe_logits,
)
from openzaya.checkpoint.convert import convert
from openzaya.checkpoint.load import load_model
from openzaya.checkpoint.plan import plan_conversion
from openzaya.checkpoint.save import save_model
from openzaya.checkpoint.trace import make_probe
from openzaya.checkpoint.weights import CONFIG, WEIGHTS
from openzaya.errors import UserError
from openzaya.model.model import Zaya
from tests.model.helpers import small_config
from tests.oracle import randomise


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """Square expert and router matrices, so that no shape gives a mistake away."""
    config = small_config(
        layer_types=("hybrid",) * 3, sliding_window=None, moe_intermediate_size=32
    )
    model = Zaya(config)
    randomise(model, 1)
    with atomic_folder(tmp_path / "original") as folder:
        save_model(model, folder)
    return tmp_path / "original"


def changed(original: Path, change) -> Path:
    """A copy without manifest, as another program would have written it."""
    folder = original.with_name("changed")
    folder.mkdir()
    (folder / CONFIG).write_text((original / CONFIG).read_text())
    tensors = load_file(original / WEIGHTS)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
    return folder


def differences(a: Path, b: Path) -> dict[str, str]:
    result = compare(open_for_reading(a), open_for_reading(b))
    assert result.equal == (not result.different and not result.settings)
    return {different.name: different.how for different in result.different}


@pytest.mark.parametrize("dialect", ["A", "B", "C"])
def test_conversions_are_equal(dialect, original, tmp_path):
    convert(plan_conversion(original, tmp_path / "to", dialect, 30_000, force=True))
    result = compare(open_for_reading(original), open_for_reading(tmp_path / "to"))
    assert result.equal
    assert result.tensors == len(load_model(original).state_dict())
    assert compare_logits(original, tmp_path / "to") == (0, 0.0)


EXPERTS = "model.layers.1.mlp.experts"
SCALE = "post_mlp_residual_scale.residual_scale"


def _swap_halves(tensors):
    gate, up = tensors[f"{EXPERTS}.gate_up_proj"].chunk(2, dim=1)
    tensors[f"{EXPERTS}.gate_up_proj"] = torch.cat([up, gate], dim=1)


def _permute(tensors):
    tensors[f"{EXPERTS}.down_proj"] = tensors[f"{EXPERTS}.down_proj"][[1, 2, 0, 3]]


def _exchange(tensors):
    a, b = f"model.layers.0.{SCALE}", f"model.layers.1.{SCALE}"
    tensors[a], tensors[b] = tensors[b], tensors[a]


@pytest.mark.parametrize(
    ("change", "name", "how"),
    [
        (_swap_halves, f"{EXPERTS}.gate_up_proj", "gate and up rows are swapped"),
        (
            lambda t: t.update({f"{EXPERTS}.down_proj": t[f"{EXPERTS}.down_proj"].mT}),
            f"{EXPERTS}.down_proj",
            "transposed",
        ),
        (_permute, f"{EXPERTS}.down_proj", "the experts are in another order"),
        (
            lambda t: t.update({f"{EXPERTS}.down_proj": t[f"{EXPERTS}.down_proj"].flip(0)}),
            f"{EXPERTS}.down_proj",
            "the experts are in reverse order",
        ),
        (
            lambda t: t.update(
                {
                    "model.layers.2.self_attn.qkv_proj.conv_qk_grouped.weight": t[
                        "model.layers.2.self_attn.qkv_proj.conv_qk_grouped.weight"
                    ].flip(-1)
                }
            ),
            "model.layers.2.self_attn.qkv_proj.conv_qk_grouped.weight",
            "the last axis is reversed",
        ),
        (
            lambda t: t.update({"model.norm.weight": t["model.norm.weight"].bfloat16().float()}),
            "model.norm.weight",
            "equal when rounded to bfloat16",
        ),
        (_exchange, f"model.layers.0.{SCALE}", f"stores it as model.layers.1.{SCALE}"),
        (
            lambda t: t["model.norm.weight"].view(-1)[:8].add_(0.5),
            "model.norm.weight",
            r"25 % of the values differ, by 5.00e-01 at most",
        ),
    ],
)
def test_what_converters_do_is_named(change, name, how, original):
    """Nothing in the changed file shows that it is wrong; beside the original it does."""
    folder = changed(original, change)
    found = differences(original, folder)
    assert how in found[name]
    assert found.keys() <= {name, f"model.layers.1.{SCALE}"}
    count, largest = compare_logits(original, folder)
    assert count > 0
    assert largest > 0


def test_dtypes_are_told_from_values(original):
    def widen(tensors):
        for name in tensors:
            if "balancing" not in name:
                tensors[name] = tensors[name].bfloat16()

    half = changed(original, widen)
    wide = original.with_name("wide")
    wide.mkdir()
    save_model(load_model(half), wide)
    found = differences(half, wide)
    assert found["model.norm.weight"] == "stored as BF16 and as F32, with equal values"
    assert compare_logits(half, wide) == (0, 0.0)
    found = differences(original, half)
    assert found["model.norm.weight"] == "stored as F32 and as BF16, with different values"


def test_settings_that_differ_are_named(original):
    folder = changed(original, lambda tensors: None)
    data = json.loads((folder / CONFIG).read_text())
    data["rope_parameters"]["hybrid"]["rope_theta"] = 50.0
    (folder / CONFIG).write_text(json.dumps(data))
    result = compare(open_for_reading(original), open_for_reading(folder))
    assert result.settings == ["rope_theta: 100.0 and 50.0"]
    assert not result.different
    assert not result.equal
    assert compare_logits(original, folder)[0] > 0


def test_models_of_different_sizes_differ(original, tmp_path):
    other = Zaya(small_config(num_hidden_layers=2, layer_types=None, sliding_window=None))
    randomise(other, 1)
    (tmp_path / "other").mkdir()
    save_model(other, tmp_path / "other")
    found = differences(original, tmp_path / "other")
    assert "only in" in found["model.layers.2.input_layernorm.weight"]
    assert "shapes" in found[f"{EXPERTS}.down_proj"]


def test_probe_logits_are_the_models(original):
    """Oracle: the same rows one by one, without padding or packing."""
    model = load_model(original)
    probe = make_probe(model.config)
    expected = []
    with torch.no_grad():
        for row, mask, positions in zip(
            probe.tokens, probe.padding_mask, probe.positions, strict=True
        ):
            tokens, places = row[mask], positions[mask]
            starts = [*(places == 0).nonzero().flatten().tolist(), len(tokens)]
            for begin, end in pairwise(starts):
                expected.append(model.logits(model(tokens[None, begin:end]).hidden[0]))
    torch.testing.assert_close(probe_logits(original), torch.cat(expected), rtol=2e-5, atol=2e-5)


def test_damage_is_an_error_not_a_difference(original):
    content = bytearray((original / WEIGHTS).read_bytes())
    content[-3] ^= 1
    (original / WEIGHTS).write_bytes(content)
    opened = open_for_reading(original)
    with pytest.raises(UserError, match="does not match its checksum"):
        check_data(opened)
    with pytest.raises(UserError, match="does not match its checksum"):
        compare(opened, opened)


def test_models_whose_logits_do_not_compare(original, tmp_path):
    """Another vocabulary: said so, and nothing infinite ends up in a report."""
    other = Zaya(small_config(vocab_size=77, layer_types=("hybrid",) * 3, sliding_window=None))
    randomise(other, 1)
    (tmp_path / "other").mkdir()
    save_model(other, tmp_path / "other")
    assert compare_logits(original, tmp_path / "other") is None
    result = compare(open_for_reading(original), open_for_reading(tmp_path / "other"))
    assert result.same + len(result.different) == result.tensors
    assert len(result.different) > result.same
    json.dumps(result.to_json(), allow_nan=False)


def test_our_own_dialect_equals_its_conversion(tmp_path):
    """Nothing but the dialect differs; once the end-of-text token did."""
    model = Zaya(small_config(skip_expert="identity"))
    randomise(model, 1)
    (tmp_path / "ours").mkdir()
    save_model(model, tmp_path / "ours")
    convert(plan_conversion(tmp_path / "ours", tmp_path / "b", "B"))
    assert compare(open_for_reading(tmp_path / "ours"), open_for_reading(tmp_path / "b")).equal


def test_neighbours_that_are_alike_are_no_explanation(original):
    """Fresh norms are all ones: that a changed one equals its neighbour means nothing."""
    alike = original.with_name("alike")
    alike.mkdir()
    model = load_model(original)
    with torch.no_grad():
        for block in model.model.layers:
            block.input_layernorm.weight.fill_(1.0)
    save_model(model, alike)
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight[0] = 2.0
    other = original.with_name("other")
    other.mkdir()
    save_model(model, other)
    found = differences(alike, other)
    assert "of the values differ" in found["model.layers.0.input_layernorm.weight"]
