import json

import pytest
from rich.console import Console

from openzaya.ablation.plots import draw
from openzaya.ablation.report import FIGURE, SUMMARY, TABLE, show, write_report
from openzaya.ablation.result import Result, check_texts
from openzaya.ablation.summary import summarise
from openzaya.ablation.variants import VARIANTS
from openzaya.errors import UserError

GAIN = {"standard": 1.0, "cca": 1.5, "router": 1.2, "residual": 1.1, "moe++": 1.8}
"""FLOPs of the standard MoE at equal loss, over those spent."""


def made(size, variant, seed, shift=0.0, **fields):
    """A result on the law of its variant: as good as the standard MoE of GAIN times its FLOPs."""
    flops = 1e4 * size**3
    loss = 20.0 * (GAIN[variant] * flops) ** -0.05 + shift
    given = {
        "size": size,
        "variant": variant,
        "seed": seed,
        "steps": 100,
        "tokens": 204_800,
        "total": 40 * size**3,
        "active": 10 * size**3,
        "training_flops": flops,
        "heldout": {"plays": loss + 0.5, "python": loss - 0.5},
        "loss": loss,
        "load_entropy": 0.98,
        "seconds": 10.0,
        "texts": {"plays": "1", "python": "2"},
    }
    return Result(**{**given, **fields})


@pytest.fixture
def results():
    return [
        made(size, variant, seed)
        for size in (96, 128, 160)
        for variant in VARIANTS
        for seed in (0, 1)
    ]


def test_equal_loss_flops_are_those_of_the_law(results):
    for row in summarise(results).rows:
        assert row.equal_loss_flops == pytest.approx(GAIN[row.variant])


def test_differences_are_taken_within_a_seed():
    """Seeds differ more than variants: what a seed shifts must not count."""
    results = [
        made(96, "standard", 0, 0.5),
        made(96, "standard", 1, -0.5),
        made(96, "cca", 0, 0.6),
        made(96, "cca", 1, -0.6),
        made(96, "cca", 2, 9.0),
    ]
    plain = made(96, "cca", 0).loss - made(96, "standard", 0).loss
    standard, cca = summarise(results).rows
    assert standard.difference is None
    assert standard.half_range == pytest.approx(0.5)
    assert cca.difference == pytest.approx(plain)
    assert cca.difference_half_range == pytest.approx(0.1)
    assert cca.seeds == (0, 1, 2)
    assert cca.heldout["plays"] - cca.heldout["python"] == pytest.approx(1.0)


def test_half_an_ablation_can_be_reported():
    one = summarise([made(96, "cca", 0)])
    (row,) = one.rows
    assert (row.difference, row.half_range, row.equal_loss_flops) == (None, None, None)
    assert not any(one.curves.values())
    two = summarise([made(96, "cca", 0), made(128, "cca", 0), made(128, "standard", 0)])
    assert set(two.curves["training_flops"]) == {"cca"}
    assert [row.equal_loss_flops for row in two.rows] == [None] * 3
    assert two.rows[2].difference is not None


def test_what_does_not_compare_is_refused():
    with pytest.raises(UserError, match="no run is finished"):
        summarise([])
    with pytest.raises(UserError, match="numbers of steps"):
        summarise([made(96, "cca", 0), made(96, "cca", 1, steps=50)])


def test_other_texts_are_named(tmp_path):
    other = made(96, "cca", 1, texts={"plays": "1", "python": "3"})
    with pytest.raises(UserError, match=r"text of python changed.*cca, seed 0.*cca, seed 1"):
        check_texts([made(96, "cca", 0), other], tmp_path)
    check_texts([made(96, "cca", 0), made(96, "cca", 1)], tmp_path)


def test_the_report_fits_in_80_columns_and_on_a_disk(results, tmp_path, capsys):
    summary = summarise(results)
    show(summary, Console(width=80))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown, "a cell was cut"
    for word in ("standard", "moe++", "1.80x", "size 160, 2 seeds", "plays", "±0.000"):
        assert word in shown
    assert write_report(summary, tmp_path, plot=True) == [
        tmp_path / name for name in (SUMMARY, TABLE, FIGURE)
    ]
    kept = json.loads((tmp_path / SUMMARY).read_text())
    assert len(kept["rows"]) == 15
    assert kept["curves"]["training_flops"]["standard"]["c"] == pytest.approx(0.05)
    assert "| moe++ | " in (tmp_path / TABLE).read_text()
    assert (tmp_path / FIGURE).read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_extra_is_named(results, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"openzaya\[plot\]"):
        draw(summarise(results), tmp_path / FIGURE)
    assert write_report(summarise(results), tmp_path, plot=False)
