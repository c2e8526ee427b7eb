"""Where checkpoints are: those of a run lie in `RUN/checkpoints/step-00000123/`."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from openzaya.checkpoint.hub import local_folder
from openzaya.checkpoint.lora_names import CONFIG as ADAPTER_CONFIG
from openzaya.checkpoint.manifest import MANIFEST, verify
from openzaya.checkpoint.weights import CONFIG
from openzaya.errors import UserError

_NAME = re.compile(r"step-(\d{8})")


def to_stderr(message: str) -> None:
    """Where notices go unless told otherwise."""
    print(message, file=sys.stderr)


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


def find_checkpoint(
    path: str | Path, say: Callable[[str], None] = to_stderr, whole: bool = False
) -> Path:
    """The model folder that `path` is, holds or names, verified where it has a manifest.

    Args:
        path: a model folder, a training run, or a hub id with its revision.
        say: told about newer checkpoints that are damaged, and of what the hub says.
        whole: verify all files; else those are left out whose tensors whoever reads them compares
            with checksums of their own.

    Raises:
        UserError: if there is none, or none is whole.
    """
    path = local_folder(path, say)
    if not path.is_dir():
        raise UserError(
            f"{path} is no folder: give a model folder, the folder of a training run, or a hub id "
            "with its revision (ORG/NAME@REVISION)"
        )
    if (path / CONFIG).exists() or (path / MANIFEST).exists():
        _refuse_adapter(path)
        problems = verify(path, tensors=whole) if (path / MANIFEST).exists() else []
        if problems:
            raise UserError(
                f"{path} is damaged: {'; '.join(problems).rstrip('.')}. Take another checkpoint, "
                "or copy this one again"
            )
        return path
    found = newest_checkpoint(path)
    if found is None:
        raise UserError(
            f"{path} holds no model: it has neither a {CONFIG} nor checkpoints of a training run "
            "(checkpoints/step-...)"
        )
    _refuse_adapter(found.path)
    for damaged in found.damaged:
        say(f"skipped a damaged checkpoint: {damaged}")
    if found.damaged:
        say(f"using the newest whole one: {found.path}")
    return found.path


def _refuse_adapter(path: Path) -> None:
    if (path / ADAPTER_CONFIG).exists() and not (path / CONFIG).exists():
        raise UserError(
            f"{path} holds an adapter and no model: give the model that it adapts, and this one "
            "with --adapter"
        )


def find_adapter(path: Path, say: Callable[[str], None] = to_stderr) -> Path:
    """The adapter folder that `path` is, or the newest one of the training run that it is.

    Raises:
        UserError: if there is none, or none is whole.
    """
    if not (path / ADAPTER_CONFIG).is_file():
        found = newest_checkpoint(path)
        if found is None or not (found.path / ADAPTER_CONFIG).is_file():
            raise UserError(
                f"{path} is no adapter: it has neither an {ADAPTER_CONFIG} nor checkpoints of a "
                "run that trained one"
            )
        for damaged in found.damaged:
            say(f"skipped a damaged checkpoint: {damaged}")
        return found.path
    problems = verify(path) if (path / MANIFEST).exists() else []
    if problems:
        raise UserError(f"{path} is damaged: {'; '.join(problems).rstrip('.')}. Take another one")
    return path


def prune(run: Path, keep: int, just_written: Path) -> None:
    """Delete all but the newest `keep` checkpoints; the one just written and verified stays."""
    for _, path in list_checkpoints(run)[:-keep]:
        if path != just_written:
            shutil.rmtree(path, ignore_errors=True)
