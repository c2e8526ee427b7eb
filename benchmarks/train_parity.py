"""Whether the fast path learns like the plain one: loss curves of the same training, side by side.

    python benchmarks/train_parity.py [--steps 300] [--plot FILE.png] [--json] [KEY=VALUE ...]

Trains the demo recipe on its bundled data, phases shortened to `--steps` steps in all, once per
path: same initial weights, same batches, same optimizers. 300 steps take about 10 minutes.

    fp32          torch, the reference
    fp32, again   the same from other initial weights: what two trainings differ by anyway
    bf16, torch   matrix products in bf16, every step written out with torch
    bf16, C       the C kernels, what a recipe runs by default

Losses are smoothed over windows of 20 steps; differences are to the reference. Passes if those of
the C kernels, in the mean and on held-out text, are no larger than those of other initial weights.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import figure, table
from rich.console import Console

from openzaya.checkpoint.save import save_model
from openzaya.config.load import load_recipe
from openzaya.config.recipe import Recipe
from openzaya.data.vocabulary import obtain_tokenizer
from openzaya.demo.plan import scaled
from openzaya.kernels.native.library import library, written_out
from openzaya.model.init import init_weights
from openzaya.model.model import Zaya
from openzaya.train.metrics import read_metrics
from openzaya.train.trainer import train

WINDOW = 20
REFERENCE, NOISE, FAST = "fp32", "fp32, again", "bf16, C"
PATHS = {
    # compute dtype, seed of the initial weights, with torch alone
    REFERENCE: ("float32", 0, True),
    NOISE: ("float32", 1, True),
    "bf16, torch": ("bfloat16", 0, True),
    FAST: ("bfloat16", 0, False),
}


def initial(recipe: Recipe, seed: int, folder: Path) -> Path:
    """A checkpoint of random weights to start from, so that the seed of the data stays."""
    folder.mkdir(exist_ok=True)
    model = Zaya(recipe.model)
    init_weights(model, seed)
    save_model(model, folder)
    return folder


def run(name: str, steps: int, overrides: list[str], tokenizer: Path, out: Path) -> dict[str, Any]:
    """Train along one path: loss of every step, held-out losses at the end, seconds."""
    dtype, seed, torch_alone = PATHS[name]
    settings = [
        *("run.eval_every=1000000", "run.checkpoint_every=1000000", "run.tensorboard=false"),
        *(f"run.compute_dtype={dtype}", f"tokenizer.path={tokenizer}"),
        *(f"name={name.replace(', ', '-')}", *overrides),
    ]
    start = initial(load_recipe("demo", settings), seed, out / f"weights-{seed}")
    recipe = scaled(load_recipe("demo", [*settings, f"start_from={start}"]), steps)
    started = time.perf_counter()
    with written_out() if torch_alone else contextlib.nullcontext():
        train(recipe, out, Console(quiet=True))
    seconds = time.perf_counter() - started
    records = read_metrics(out / recipe.name)
    return {
        "loss": [record["loss"] for record in records if "loss" in record],
        "heldout": [record["heldout"] for record in records if "heldout" in record][-1],
        "seconds": seconds,
    }


def smooth(losses: list[float]) -> list[float]:
    """Means over a window that slides."""
    window = min(WINDOW, len(losses))
    return [statistics.fmean(losses[i : i + window]) for i in range(len(losses) - window + 1)]


def differences(result: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """To the reference: of the smoothed curves, and of the held-out losses."""
    pairs = zip(smooth(result["loss"]), smooth(reference["loss"]), strict=True)
    curve = [abs(a - b) for a, b in pairs]
    heldout = [result["heldout"][k] - reference["heldout"][k] for k in reference["heldout"]]
    return {
        "first": result["loss"][0] - reference["loss"][0],
        "mean": statistics.fmean(curve),
        "max": max(curve),
        "last": smooth(result["loss"])[-1] - smooth(reference["loss"])[-1],
        "heldout": statistics.fmean(heldout),
        "heldout_absolute": statistics.fmean(map(abs, heldout)),
    }


def show(results: dict[str, dict[str, Any]], console: Console) -> None:
    """Curves, their differences, and held-out losses."""
    reference = results[REFERENCE]
    steps = len(reference["loss"])
    marks = sorted({round(steps * part / 5) for part in range(1, 6)} | {1})
    columns = ("loss near step", *map(str, marks))
    lines = []
    for name, result in results.items():
        near = (result["loss"][max(mark - WINDOW, 0) : mark] for mark in marks)
        lines.append((name, *(f"{statistics.fmean(part):.3f}" for part in near)))
    console.print(table(f"mean loss of up to {WINDOW} steps before", columns, lines))
    lines = []
    for name, result in results.items():
        if name != REFERENCE:
            d = result["differences"]
            cells = (f"{d[key]:+.4f}" for key in ("first", "last"))
            lines.append((name, *cells, f"{d['mean']:.4f}", f"{d['max']:.4f}"))
    columns = ("", "at step 1", "at the end", "mean |d|", "max |d|")
    console.print(table("difference of the smoothed curves to fp32", columns, lines))
    sources = list(reference["heldout"])
    lines = [
        (
            name,
            *(f"{result['heldout'][source]:.4f}" for source in sources),
            f"{result['differences']['heldout']:+.4f}",
            f"{result['seconds']:,.0f}",
        )
        for name, result in results.items()
    ]
    columns = ("held-out loss", *sources, "mean d", "seconds")
    console.print(table("after the last step", columns, lines))


def draw(results: dict[str, dict[str, Any]], path: Path | None, console: Console) -> None:
    """Smoothed curves, and their differences to the reference."""
    drawing = figure(path, 2, console)
    if drawing is None:
        return
    picture, (left, right) = drawing
    reference = smooth(results[REFERENCE]["loss"])
    for name, result in results.items():
        curve = smooth(result["loss"])
        steps = range(len(result["loss"]) - len(curve) + 1, len(result["loss"]) + 1)
        left.plot(steps, curve, label=name)
        right.plot(steps, [a - b for a, b in zip(curve, reference, strict=True)], label=name)
    left.set(title=f"loss, mean of {WINDOW} steps", xlabel="step", ylabel="nats a token")
    right.set(title="difference to fp32", xlabel="step")
    left.legend()
    picture.savefig(path)
    console.print(f"drawn: {path}")


def passes(results: dict[str, dict[str, Any]]) -> bool:
    """Whether the fast path stays within what other initial weights change."""
    fast, noise = results[FAST]["differences"], results[NOISE]["differences"]
    return bool(
        fast["mean"] <= noise["mean"] and fast["heldout_absolute"] <= noise["heldout_absolute"]
    )


def main() -> None:
    """Print the curves and what they differ by; exit code 1 if it is more than noise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--plot", type=Path, default=None, help="draw into this file")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*", help="of the demo recipe")
    args = parser.parse_args()
    notes, console = Console(stderr=True), Console()
    if library() is None:
        raise SystemExit("there are no C kernels on this machine (no compiler?) to compare with")
    overrides = [*args.overrides, f"run.threads={args.threads}"]
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch)
        tokenizer = out / "tokenizer.json"
        recipe = load_recipe("demo", overrides)
        obtain_tokenizer(recipe.tokenizer, recipe.sources).save(tokenizer)
        for name in PATHS:
            notes.print(f"training: {name}", style="dim")
            results[name] = run(name, args.steps, overrides, tokenizer, out)
    for result in results.values():
        result["differences"] = differences(result, results[REFERENCE])
    draw(results, args.plot, notes)
    if args.json:
        print(json.dumps(results))
    else:
        show(results, console)
        verdict = "no more than" if passes(results) else "MORE than"
        console.print(f"the C kernels change {verdict} what other initial weights do")
    sys.exit(not passes(results))


if __name__ == "__main__":
    main()
