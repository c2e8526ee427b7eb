"""The checkpoints of one training run: `RUN/checkpoints/step-00000123/`."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from openzaya.checkpoint.manifest import verify
from openzaya.errors import UserError

_NAME = re.compile(r"step-(\d{8})")


@dataclass
class Found:
    """The newest checkpoint that is whole.

    Attributes:
        path: its folder.
        step: optimizer steps it has behind it.
        damaged: newer ones that are not whole, each with what is wrong.
    """

    path: Path
    step: int
    damaged: list[str]


def checkpoint_path(run: Path, step: int) -> Path:
    """Folder of the checkpoint after `step` optimizer steps."""
    return run / "checkpoints" / f"step-{step:08d}"


def list_checkpoints(run: Path) -> list[tuple[int, Path]]:
    """(step, folder) of all finished checkpoints, oldest first; none of them verified."""
    folder = run / "checkpoints"
    if not folder.is_dir():
        return []
    found = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in found if match)


def newest_checkpoint(run: Path) -> Found | None:
    """The newest checkpoint whose digests match; None if the run has no checkpoint.

    Raises:
        UserError: if there are checkpoints, and all are damaged.
    """
    damaged: list[str] = []
    for step, path in reversed(list_checkpoints(run)):
        problems = verify(path)
        if not problems:
            return Found(path, step, damaged)
        damaged.append(f"{path}: {'; '.join(problems)}")
    if damaged:
        raise UserError(
            "every checkpoint of this run is damaged; remove the run's folder to start again:\n  "
            + "\n  ".join(damaged)
        )
    return None


def prune(run: Path, keep: int, just_written: Path) -> None:
    """Delete all but the newest `keep` checkpoints; the one just written and verified stays."""
    for _, path in list_checkpoints(run)[:-keep]:
        if path != just_written:
            shutil.rmtree(path, ignore_errors=True)
