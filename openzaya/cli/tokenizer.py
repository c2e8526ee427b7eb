"""The tokenizer that an option names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openzaya.data.tokenizer import Tokenizer


def load_tokenizer(name: str) -> tuple[Tokenizer, Path]:
    """Read a tokenizer.json, that of a checkpoint, or that of a run's newest checkpoint.

    Returns:
        It and the folder it is in, where a chat template may be too.

    Raises:
        UserError: if there is none.
    """
    from openzaya.data.tokenizer import TOKENIZER_FILE, Tokenizer

    path = Path(name)
    if path.is_dir() and not (path / TOKENIZER_FILE).is_file():
        from openzaya.checkpoint.run import find_checkpoint  # slow to import

        path = find_checkpoint(name)
    file = path / TOKENIZER_FILE if path.is_dir() else path
    return Tokenizer.load(file), file.parent
