"""What hand-written converters get wrong, and no header gives away.

Where the folder has its manifest, a wrong tensor is named when it is read; beside the original,
`compare` says what was done to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from openzaya.checkpoint.compare import compare, compare_logits, open_for_reading, probe_logits
from openzaya.checkpoint.weights import CONFIG, WEIGHTS
from openzaya.cli.main import main
from openzaya.errors import UserError
from tests.checkpoint.checkpoints import (
    BLOCKS,
    EXPERTS,
    Tensors,
    check_refused,
    every_dialect,
    every_layout,
    legacy,
    make,
    make_sharded,
    rewrite,
    stored_name,
    stored_names,
)

SQUARE = {"moe_intermediate_size": 32, "num_attention_heads": 2}  # no shape gives anything away
CCA = "model.layers.1.self_attn.qkv_proj"
GATE = "model.layers.1.mlp.gate"
GATE_UP, DOWN = (f"model.layers.1.mlp.experts.{name}_proj" for name in ("gate_up", "down"))
TEMP = "model.layers.1.self_attn.qk_norm.temp"

Change = Callable[[Tensors, str], None]


def _each(native: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Do something to every stored part of a native tensor."""

    def apply(tensors: Tensors, dialect: str) -> None:
        for name in stored_names(native, dialect):
            tensors[name] = change(tensors[name]).contiguous()

    return apply


def _exchange(*natives: str) -> Change:
    def apply(tensors: Tensors, dialect: str) -> None:
        a, b = (stored_name(native, dialect) for native in natives)
        tensors[a], tensors[b] = tensors[b], tensors[a]

    return apply


def _permute(order: list[int], *natives: str) -> Change:
    def apply(tensors: Tensors, dialect: str) -> None:
        for native in natives:
            names = stored_names(native, dialect)
            if dialect == "C":
                tensors[native] = tensors[native][order]
            else:
                before = {name: tensors[name] for name in names}
                tensors |= {name: before[names[order[i]]] for i, name in enumerate(names)}

    return apply


def _swap_halves(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat(tensor.chunk(2, dim=-2)[::-1], dim=-2)


MISTAKES = [
    pytest.param(_each(DOWN, lambda t: t.mT), {DOWN: "transposed"}, id="experts-transposed"),
    pytest.param(
        _each(f"{CCA}.q_proj.weight", lambda t: t.mT),
        {f"{CCA}.q_proj.weight": "transposed"},
        id="queries-transposed",
    ),
    pytest.param(
        _each(f"{GATE}.router_mlp.fc1.weight", lambda t: t.mT),
        {f"{GATE}.router_mlp.fc1.weight": "transposed"},
        id="router-transposed",
    ),
    pytest.param(
        _each(GATE_UP, _swap_halves),
        {GATE_UP: "gate and up rows are swapped"},
        id="gate-and-up-swapped",
    ),
    pytest.param(
        _exchange(f"{CCA}.q_proj.weight", f"{CCA}.k_proj.weight"),
        {f"{CCA}.q_proj.weight": "", f"{CCA}.k_proj.weight": ""},
        id="queries-and-keys-swapped",
    ),
    pytest.param(
        _exchange(f"{CCA}.v_proj_current.weight", f"{CCA}.v_proj_delayed.weight"),
        {
            f"{CCA}.v_proj_current.weight": f"{CCA}.v_proj_delayed.weight",
            f"{CCA}.v_proj_delayed.weight": f"{CCA}.v_proj_current.weight",
        },
        id="values-swapped",
    ),
    pytest.param(
        _permute([1, 2, 0, 3], GATE_UP, DOWN),
        {GATE_UP: "experts are in another order", DOWN: "experts are in another order"},
        id="experts-permuted",
    ),
    pytest.param(
        _permute([3, 2, 1, 0], GATE_UP),
        {GATE_UP: "experts are in reverse order"},
        id="experts-reversed",
    ),
    pytest.param(
        _each(f"{CCA}.conv_qk_depthwise.weight", lambda t: t.flip(-1)),
        {f"{CCA}.conv_qk_depthwise.weight": "the last axis is reversed"},
        id="taps-reversed",
    ),
    pytest.param(_each(TEMP, torch.log), {TEMP: "% of the values differ"}, id="temperature-in-log"),
    pytest.param(
        _each(f"{GATE}.router_states_scale", torch.zeros_like),
        {f"{GATE}.router_states_scale": "100 % of the values differ"},
        id="router-states-dropped",
    ),
    pytest.param(
        _each("model.norm.weight", lambda t: t - 1),
        {"model.norm.weight": "by 1.00e+00 at most"},
        id="gain-minus-one",
    ),
]


def _mistaken(folder: Path, dialect: str, change: Change, manifest: bool = False) -> Path:
    make(folder, dialect, manifest=manifest, **SQUARE)
    rewrite(folder, lambda tensors: change(tensors, dialect))
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A native checkpoint and its logits on the probe."""
    folder = make(tmp_path_factory.mktemp("mistakes") / "original", "C", **SQUARE)
    return folder, probe_logits(folder)


@every_layout
@pytest.mark.parametrize(("change", "expected"), MISTAKES)
def test_beside_the_original_it_is_named(change, expected, dialect, original, tmp_path):
    """The original is native, as published; the mistaken one opens, and computes something else."""
    original, _ = original
    folder = _mistaken(tmp_path / "mistaken", dialect, change)
    found = {
        different.name: different.how
        for different in compare(open_for_reading(original), open_for_reading(folder)).different
    }
    assert found.keys() == expected.keys()
    for name, how in expected.items():
        assert how in found[name]
    count, largest = compare_logits(original, folder)
    assert count > 0
    assert largest > 1e-3


@every_layout
@pytest.mark.parametrize(("change", "expected"), MISTAKES)
def test_with_its_manifest_it_is_refused(change, expected, dialect, tmp_path):
    folder = _mistaken(tmp_path / "source", dialect, change, manifest=True)
    check_refused(folder, dialect, "does not match its checksum")
    with pytest.raises(UserError) as caught:
        compare(open_for_reading(folder), open_for_reading(folder))
    names = {name for native in expected for name in stored_names(native, dialect)}
    assert any(f"tensor {name} " in str(caught.value) for name in names)


# The residual scales, half a layer off


def _shifted(tensors: Tensors) -> Tensors:
    """Scales of each half-layer stored at the one before it, as if they belonged to its end.

    The first half-layer has no residual scale, so the shift makes up neutral ones at the end.
    """
    homes = [*(f"model.layers.{half}" for half in range(2 * BLOCKS)), "model"]
    shifted = dict(tensors)
    for home, following in zip(homes, [*homes[1:], None], strict=True):
        for part in ("hidden_states", "residual"):
            for kind, neutral in (("scale", torch.ones), ("bias", torch.zeros)):
                name = f"res_scale.{part}_{kind}"
                if home == homes[0] and part == "residual":
                    continue
                shifted[f"{home}.{name}"] = (
                    neutral(32) if following is None else tensors[f"{following}.{name}"]
                )
    return shifted


@legacy
def test_residual_scales_half_a_layer_off(dialect, tmp_path):
    """The usual mistake of hand-written converters fits every header; the original names it."""
    original = make(tmp_path / "original", "C")
    folder = make(tmp_path / "mistaken", dialect)
    rewrite(folder, lambda tensors: tensors.update(_shifted(dict(tensors))))
    found = {
        different.name: different.how
        for different in compare(open_for_reading(original), open_for_reading(folder)).different
    }
    # The original's scale at the end of a block lies half a layer earlier in the other.
    name = "model.layers.1.post_mlp_residual_scale.residual_scale"
    assert "the other one stores it as" in found[name]
    assert "model.layers.1.post_attention_residual_scale.residual_scale" in found[name]
    assert all("_scale" in name or "input_hidden_states_bias" in name for name in found)
    assert len(found) == 2 + 8 * BLOCKS
    count, largest = compare_logits(original, folder)
    assert count > 0
    assert largest > 1e-3


@every_dialect
def test_verify_says_so_and_ends_with_1(dialect, tmp_path, capsys):
    original = make(tmp_path / "original", "C", **SQUARE)
    folder = _mistaken(tmp_path / "mistaken", dialect, _each(GATE_UP, _swap_halves))
    assert main(["verify", str(original), str(original)]) == 0
    capsys.readouterr()
    assert main(["verify", str(original), str(folder)]) == 1
    out = capsys.readouterr().out
    assert f"{GATE_UP}: gate and up rows are swapped" in out
    assert "logits of the probe differ" in out
    assert "NOT the same model" in out


@every_dialect
@pytest.mark.parametrize("sharded", [False, True])
def test_damage_ends_with_2_and_no_traceback(sharded, dialect, tmp_path, capsys):
    maker = make_sharded if sharded else make
    folder = maker(tmp_path / "source", dialect, manifest=True)
    file = sorted(folder.glob("*.safetensors"))[0]
    content = bytearray(file.read_bytes())
    content[-2] ^= 4
    file.write_bytes(content)
    target = tmp_path / "target"
    other = "B" if dialect != "B" else "C"
    for command in (
        ["verify", str(folder)],
        ["convert", str(folder), str(target), "--to", other, "--force"],
    ):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert "does not match" in said
        assert str(folder) in said
        assert file.name in said
        assert "Traceback" not in said
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


@every_dialect
def test_settings_of_another_checkpoint_are_a_difference(dialect, tmp_path):
    """Tensors alike, a setting not: no shape depends on it, but every answer does."""
    original = make(tmp_path / "original", dialect)
    folder = make(tmp_path / "other", dialect)
    other = make(tmp_path / "third", dialect, rope_theta=50.0)
    (folder / CONFIG).write_text(json.dumps(json.loads((other / CONFIG).read_text())))
    result = compare(open_for_reading(original), open_for_reading(folder))
    assert result.settings == ["rope_theta: 100.0 and 50.0"]
    assert not result.different
    assert compare_logits(original, folder)[0] > 0


def test_the_makers_are_what_these_tests_think(tmp_path):
    folder = make(tmp_path / "source", "A", **SQUARE)
    assert (folder / WEIGHTS).exists()
    assert len(stored_names(GATE_UP, "A")) == EXPERTS
    assert stored_names(GATE_UP, "C") == [GATE_UP]
