"""The log of a run: one JSON line per step, and TensorBoard events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from openzaya.checkpoint.atomic import write_text
from openzaya.errors import UserError

FILE = "metrics.jsonl"


class MetricsLog:
    """Appends records to `RUN/metrics.jsonl` and, if asked, to `RUN/tensorboard/`.

    A resumed run drops what was logged after the step it continues from, so that the log reads
    like that of a run which never stopped.

    Args:
        run: the run's folder.
        resume_step: steps done; later records are dropped.
        tensorboard: also write event files.
    """

    def __init__(self, run: Path, resume_step: int, tensorboard: bool) -> None:
        self._path = run / FILE
        kept = [record for record in read_metrics(run) if record["step"] <= resume_step]
        self.evaluated = any("heldout" in r and r["step"] == resume_step for r in kept)
        """Whether the log holds the held-out losses of the step that is resumed from."""
        write_text(self._path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = self._path.open("a", encoding="utf-8")
        self._board = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(run / "tensorboard"), purge_step=resume_step + 1)

    def write(self, record: dict[str, Any]) -> None:
        """Append one record; it must have a "step".

        Numbers go to TensorBoard under their key, lists and tables of numbers under `key/index`.
        """
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise UserError(
                f"cannot write {self._path}: {error.strerror}: free some room, then run the same "
                "command again; it continues from the last checkpoint"
            ) from error
        if self._board is None:
            return
        for key, value in record.items():
            if isinstance(value, list):
                value = dict(enumerate(value))
            if isinstance(value, dict):
                for index, item in value.items():
                    if isinstance(item, list):  # counts per layer and expert: in the log only
                        continue
                    self._board.add_scalar(f"{key}/{index}", item, record["step"])
            elif isinstance(value, int | float) and key != "step":
                self._board.add_scalar(key, value, record["step"])

    def close(self) -> None:
        """Flush and close."""
        self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """All records of a run in order; a line torn by a crash ends the list."""
    records: list[dict[str, Any]] = []
    path = run / FILE
    if not path.is_file():
        return records
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records
