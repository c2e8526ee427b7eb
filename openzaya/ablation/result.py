"""What is kept of a finished run: `RUN/result.json`, written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from openzaya.ablation.plan import PlannedRun
from openzaya.checkpoint.atomic import write_text
from openzaya.errors import UserError
from openzaya.model.accounting import count_parameters
from openzaya.train.metrics import read_metrics
from openzaya.train.setup import SOURCES

RESULT = "result.json"


class Result(BaseModel):
    """A finished run.

    Attributes:
        size, variant, seed: which one.
        steps, tokens: trained; padding is no token.
        total, active: parameters without embeddings.
        training_flops: of all steps (`PlannedRun.training_flops`).
        heldout: nats per token by source, after the last step.
        loss: mean of these over sources.
        load_entropy: of the least even layer, mean over the last tenth of the steps.
        seconds: in training steps.
        texts: digests of the tokenised sources.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    size: int
    variant: str
    seed: int
    steps: int
    tokens: int
    total: int
    active: int
    training_flops: float
    heldout: dict[str, float]
    loss: float
    load_entropy: float
    seconds: float
    texts: dict[str, str]


def record(planned: PlannedRun, folder: Path) -> Result:
    """Gather and write the result of a run that has just been trained to its end.

    Raises:
        UserError: if its log is incomplete, or cannot be written.
    """
    records = read_metrics(folder)
    steps = [entry for entry in records if "loss" in entry]
    heldout = [entry for entry in records if "heldout" in entry]
    last = planned.recipe.total_steps
    if not steps or not heldout or steps[-1]["step"] != last or heldout[-1]["step"] != last:
        raise UserError(
            f"the log of {folder} does not reach step {last}, which the run has behind it: remove "
            "the folder to train it again."
        )
    losses: dict[str, float] = heldout[-1]["heldout"]
    parameters = count_parameters(planned.recipe.model)
    late = steps[-max(len(steps) // 10, 1) :]
    result = Result(
        size=planned.size,
        variant=planned.variant,
        seed=planned.seed,
        steps=last,
        tokens=steps[-1]["tokens"],
        total=parameters.total_without_embeddings,
        active=parameters.active_without_embeddings,
        training_flops=planned.training_flops,
        heldout=losses,
        loss=sum(losses.values()) / len(losses),
        load_entropy=sum(min(entry["load_entropy"]) for entry in late) / len(late),
        seconds=sum(entry["seconds"] for entry in steps),
        texts=json.loads((folder / SOURCES).read_text()),
    )
    write_text(folder / RESULT, result.model_dump_json(indent=1) + "\n")
    return result


def read_result(folder: Path) -> Result | None:
    """The result of a run; None where there is none yet, or a damaged one (it is made again)."""
    with suppress(OSError, ValidationError):
        return Result.model_validate_json((folder / RESULT).read_text())
    return None


def all_results(out: Path) -> list[Result]:
    """Results of all finished runs of an ablation, by size, seed and variant.

    Raises:
        UserError: if the runs were trained on different texts.
    """
    results = [found for file in out.glob(f"*/{RESULT}") if (found := read_result(file.parent))]
    check_texts(results, out)
    return sorted(results, key=lambda r: (r.size, r.seed, r.variant))


def check_texts(results: Iterable[Result], out: Path) -> None:
    """Losses on different texts cannot be compared.

    Raises:
        UserError: naming two such runs.
    """
    first: Result | None = None
    for result in results:
        first = first or result
        changed = sorted(
            name
            for name in first.texts.keys() | result.texts.keys()
            if first.texts.get(name) != result.texts.get(name)
        )
        if changed:
            raise UserError(
                f"the text of {', '.join(changed)} changed in the course of {out}: size "
                f"{first.size}, {first.variant}, seed {first.seed} and size {result.size}, "
                f"{result.variant}, seed {result.seed} read different ones. Begin again with "
                "another --out."
            )
