import io

from rich.console import Console

from openzaya.config.load import load_recipe
from openzaya.train.live import LiveView

RECORD = {
    "phase": "text",
    "loss": 3.25,
    "grad_norm": 0.5,
    "lr": 1e-3,
    "step_tokens": 4096,
    "seconds": 2.0,
    "load_entropy": [0.97, 0.88],
    "skip_share": [0.0, 0.125],
}


def shown(terminal: bool) -> str:
    recipe = load_recipe("tiny")
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=terminal, color_system=None)
    with LiveView(recipe, console, start_step=0) as view:
        for step in range(1, 60):
            view.step({**RECORD, "step": step, "loss": 10 / step})
        view.heldout({"plays": 4.5, "sums": 1.25})
        view.step({**RECORD, "step": 60})
    return out.getvalue()


def test_the_panel_shows_what_matters_on_lines_of_its_own():
    last = shown(terminal=True).split("phase text")[-1].splitlines()
    text = "\n".join(last)
    for part in ("step 60/200", "2,048 tokens/s", "left", "3.250", "0.880", "12.5%", "plays 4.500"):
        assert part in text
    assert any(line.lstrip("\x1b[2K1AG ").startswith("loss") for line in last)
    bars = [line.strip() for line in last if "━" in line]
    assert bars
    assert all(set(bar) <= set("━╸╺") for bar in bars), "the bar has its line to itself"


def test_elsewhere_it_is_plain_lines_that_fit():
    lines = shown(terminal=False).splitlines()
    assert 2 <= len(lines) < 10, "not one a step"
    assert all(len(line) <= 80 and "\x1b" not in line for line in lines)
    assert "held-out  plays 4.500  sums 1.250" in "\n".join(lines)
