"""A whole training step beside `transformers`: same weights, data, threads and allocator.

    python benchmarks/train_vs_transformers.py [--geometry small|mid] [--compiled yes|no] [--json]

Forward, loss, backward and fused AdamW, each setting in a process of its own, so that its peak
memory is its own. The peer runs in all its settings: experts grouped or in a loop, fp32 or bf16
autocast, plain or under `torch.compile`. It takes turns with our bf16 step, round by round: a ratio
is the median over the rounds, and a machine whose speed drifts treats both alike. Before anything
is timed, both must find the same loss.

small is 256 wide with 6 layers of 8 experts, and takes a quarter of an hour, most of it the peer's
compilation; mid is 768 wide with 12 layers of 16 experts (360M parameters, 42M active), and only
one model at a time is in memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from common import (
    GEOMETRIES,
    PARTS,
    Job,
    Measured,
    Worker,
    WorkerFailed,
    alternate,
    milliseconds,
    spread,
    table,
)
from rich.console import Console

from openzaya.model.accounting import count_parameters

OURS = "openzaya bf16"
TOLERANCE = 2e-2
"""In nats, between the first losses of both sides."""


def our_jobs(job: Job) -> dict[str, Job]:
    """Our settings; the first is what all others are compared with."""
    return {
        OURS: job,
        "openzaya bf16 recompute": job.model_copy(update={"recompute": "full"}),
        "openzaya fp32": job.model_copy(update={"dtype": "fp32"}),
    }


def peer_jobs(job: Job, compiled: bool) -> dict[str, Job]:
    """All settings of the peer."""
    jobs = {}
    for compile_ in (False, True) if compiled else (False,):
        for experts in ("grouped_mm", "eager"):
            for dtype in ("fp32", "bf16"):
                name = f"{experts} {dtype}" + (" compiled" if compile_ else "")
                changed = {"side": "peer", "experts": experts, "dtype": dtype, "compiled": compile_}
                jobs[name] = job.model_copy(update=changed)
    return jobs


def same_loss(name: str, row: Measured, ours: Measured) -> None:
    """Refuse to compare sides that do not compute the same."""
    theirs, expected = row.losses[0], ours.losses[0]
    if not abs(theirs - expected) < TOLERANCE:
        raise SystemExit(f"{name} starts with loss {theirs:.4f}, openzaya with {expected:.4f}")


def compare(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure all settings of one geometry."""
    config = GEOMETRIES[args.geometry]
    job = Job(config=config, batch=args.batch, context=args.context, threads=args.threads)
    everything = our_jobs(job) | peer_jobs(job, args.compiled == "yes")
    everything = {n: j for n, j in everything.items() if args.only in n or n == OURS}
    rows: dict[str, dict[str, Any]] = {}
    base: list[Measured] = []
    for name, other in everything.items():
        if name == OURS:
            continue
        console.print(f"measuring {name}", style="dim")
        try:
            pair = alternate(
                {OURS: job, name: other},
                args.rounds,
                args.steps,
                warmup=args.warmup,
                together=args.geometry == "small",
            )
        except WorkerFailed as error:
            rows[name] = {"failed": str(error)}
            continue
        same_loss(name, pair[name], pair[OURS])
        base.append(pair[OURS])
        rows[name] = {**pair[name].to_json(), "ratio": pair[name].ratio_to(pair[OURS])}
    if not base:
        raise SystemExit("nothing could be compared: " + "; ".join(map(str, rows.items())))
    ours = Measured(
        [turn for m in base for turn in m.rounds],
        base[0].losses,
        statistics.median(m.peak_mib for m in base),
        base[0].start_mib,
    )
    with Worker(job) as worker:
        worker.ask("steps", args.warmup)
        profile = worker.ask("profile", args.steps)
        matrices = worker.ask("matrices")
    parameters = count_parameters(config)
    peers = {n: row["ratio"] for n, row in rows.items() if "ratio" in row and "openzaya" not in n}
    best = min(peers, key=lambda name: peers[name]) if peers else None
    return {
        "geometry": args.geometry,
        "batch": args.batch,
        "context": args.context,
        "threads": args.threads,
        "parameters": parameters.total,
        "active": parameters.active,
        "tokens": job.tokens,
        "step_flops": job.flops,
        "matrix_flops": matrices,
        "rows": {OURS: {**ours.to_json(), "ratio": 1.0}, **rows},
        "best_peer": best,
        "ratio_to_best_peer": None if best is None else peers[best],
        "operations": profile["operations"],
    }


def show(result: dict[str, Any], console: Console) -> None:
    """The table of one geometry, and where our time goes."""
    lines: list[tuple[str, ...]] = []
    for name, row in result["rows"].items():
        if "failed" in row:
            lines.append((name, row["failed"], "", "", "", ""))
            continue
        lines.append(
            (
                name,
                f"{result['tokens'] / row['median']:,.0f}",
                milliseconds(row["median"]),
                spread(row["seconds"]),
                f"{row['peak_mib']:,.0f}",
                f"{row['ratio']:.2f}",
            )
        )
    title = (
        f"{result['geometry']}: {result['parameters'] / 1e6:.1f}M parameters, "
        f"{result['active'] / 1e6:.1f}M active, {result['batch']} x {result['context']} tokens, "
        f"{result['threads']} threads"
    )
    columns = ("setting", "tokens/s", "step ms", "min-max", "peak MiB", "ratio")
    console.print(table(title, columns, lines))
    starts = {
        side: max(
            row["start_mib"]
            for name, row in result["rows"].items()
            if "start_mib" in row and name.startswith("openzaya") == (side == "ours")
        )
        for side in (("ours", "the peer's") if result["best_peer"] else ("ours",))
    }
    sizes = ", ".join(f"{mib:,.0f} MiB {side}" for side, mib in starts.items())
    console.print(
        "ratio is the step's time over ours in the same turns; peak MiB is what the\n"
        f"process takes more than with a tiny model ({sizes})"
    )
    if result["best_peer"]:
        console.print(
            f"{result['ratio_to_best_peer']:.2f} times as fast as the peer's best setting "
            f"({result['best_peer']})",
            style="bold",
        )
    ours = result["rows"][OURS]
    where = [
        (part, milliseconds(ours["parts"][part]), f"{ours['parts'][part] / ours['median']:.0%}")
        for part in PARTS
    ]
    console.print(table("where our time goes", ("part", "ms", "share"), where))
    operations = [
        (op["name"][:48], f"{op['ms']:.1f}", f"{op['calls']:.0f}", f"{op['share']:.0%}")
        for op in result["operations"]
    ]
    heads = ("operation (profiler, own time)", "ms", "calls", "share")
    console.print(table("", heads, operations))
    rate, peak = result["step_flops"] / ours["median"], result["matrix_flops"]
    console.print(
        f"{result['step_flops'] / 1e9:,.0f} GFLOP of products in a step, attention's included: "
        f"{rate / 1e9:,.0f} GFLOP/s,\n{rate / peak['bf16']:.0%} of a 2048^3 product's in bf16 "
        f"({peak['bf16'] / 1e9:,.0f}), {rate / peak['fp32']:.0%} of one's in fp32 "
        f"({peak['fp32'] / 1e9:,.0f})"
    )


def main() -> None:
    """Print one table, and where our time goes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--geometry", choices=[*GEOMETRIES], default="small")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    parser.add_argument("--steps", type=int, default=2, help="steps of a turn")
    parser.add_argument("--warmup", type=int, default=2, help="steps of a process not counted")
    parser.add_argument(
        "--compiled",
        choices=("yes", "no"),
        help="also the peer under torch.compile, minutes more: by default yes for small only",
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="settings with this in the name")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.compiled = args.compiled or ("yes" if args.geometry == "small" else "no")
    result = compare(args, Console(stderr=True))
    if args.json:
        print(json.dumps(result))
    else:
        show(result, Console())


if __name__ == "__main__":
    main()
