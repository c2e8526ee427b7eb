"""Which documents are kept for evaluation: a hash of their place and content decides."""

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


def is_heldout(index: int, text: str | int, share: float) -> bool:
    """Whether a document belongs to the held-out share."""
    return heldout_draw(index, text) < share * 2.0**64
