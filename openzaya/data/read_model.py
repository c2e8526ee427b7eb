"""What loading asks of the storage, in closed form.

Source: ZAYA1-8B report, Appendix B. Each step reads G sequences of s tokens of b bytes in pages of
P bytes, within t seconds. The read amplification sigma is pages read over pages that the bytes
would fill: 1 if they lay page by page, more as each sequence adds m pages of its own (the one that
its unaligned ends share with others, and those of the index).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReadModel:
    """One global batch and its storage.

    Attributes:
        sequences: G.
        context: s, tokens.
        token_bytes: b, bytes of a stored token.
        page_bytes: P.
        seconds: t, of one step.
    """

    sequences: int
    context: int
    token_bytes: int
    page_bytes: int = 4096
    seconds: float = 1.0

    @property
    def bytes(self) -> int:
        """Bytes that a step needs."""
        return self.sequences * self.context * self.token_bytes

    @property
    def pages(self) -> float:
        """Pages that these bytes fill."""
        return self.bytes / self.page_bytes

    def iops(self, sigma: float) -> float:
        """Page reads a second that keep up with training."""
        return sigma * self.pages / self.seconds

    def break_seconds(self, sigma: float, max_iops: float) -> float:
        """t_break: the step time below which storage of `max_iops` cannot keep up."""
        return sigma * self.pages / max_iops

    def sigma(self, extra_pages: float) -> float:
        """The read amplification if every sequence costs m = `extra_pages` pages beside its own."""
        return 1 + extra_pages * self.page_bytes / (self.context * self.token_bytes)


PUBLISHED = ReadModel(sequences=4096, context=4096, token_bytes=4, page_bytes=4096, seconds=2.5)
"""The published case; its storage is good for `PUBLISHED_IOPS`."""

PUBLISHED_IOPS = 70_000
