"""Which documents are kept for evaluation.

A hash of their place and content decides; or, where the ends of files are held out, every file is
two documents, the second of which is its end.
"""

from __future__ import annotations

from openzaya.data.rng import hash64

SIDES = ("train", "heldout")


def heldout_draw(index: int, text: str | int) -> int:
    """The number below 2**64 that a document draws.

    Args:
        index: Its place among the documents of its source.
        text: Its content, or `rng.text_hash` of it.
    """
    return hash64("heldout", index, text)


def is_heldout(index: int, text: str | int, share: float, ends: bool = False) -> bool:
    """Whether a document belongs to the held-out share; `ends`: the ends of files do."""
    if ends:
        return index % 2 == 1
    return heldout_draw(index, text) < share * 2.0**64
