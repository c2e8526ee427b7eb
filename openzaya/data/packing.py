"""Rows of a batch: documents side by side, with positions that restart and targets that stop.

A model that restarts at position 0 never sees one document from another. The same border holds for
targets: what follows a document's last token is nothing (-100), not the next document.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

IGNORE = -100
Array = npt.NDArray[np.int64]
# Ids, and a loss mask (1 where a token is to be predicted; None: everywhere), both [length].
Document = tuple[Sequence[int] | npt.NDArray[Any], Sequence[int] | npt.NDArray[Any] | None]


@dataclass(frozen=True)
class Row:
    """One row: tokens, targets and positions, each int64 [seq], and how many are no padding."""

    tokens: Array
    targets: Array
    positions: Array
    real_tokens: int


@dataclass(frozen=True)
class Batch:
    """What the model trains on.

    Attributes:
        tokens: Inputs, int64 [batch, seq].
        targets: The token to predict at each place, `IGNORE` for none, int64 [batch, seq].
        positions: Place within the document, int64 [batch, seq]: 0 starts a document, and every
            row starts one. Padding at a row's end counts as one more document.
        real_tokens: Tokens of the batch that are no padding.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    real_tokens: int


def stack(rows: Sequence[Row]) -> Batch:
    """Rows to a batch."""
    return Batch(
        tokens=torch.from_numpy(np.stack([row.tokens for row in rows])),
        targets=torch.from_numpy(np.stack([row.targets for row in rows])),
        positions=torch.from_numpy(np.stack([row.positions for row in rows])),
        real_tokens=sum(row.real_tokens for row in rows),
    )


def window_row(tokens: Array, starts: Array) -> Row:
    """A row cut out of running text.

    Args:
        tokens: int64 [seq + 1]; the last one is only a target.
        starts: Places in `tokens` where documents start, ascending; 0 need not be among them.
    """
    length = len(tokens) - 1
    targets = tokens[1:].copy()
    inner = starts[(starts > 0) & (starts <= length)]
    targets[inner - 1] = IGNORE
    origin = np.zeros(length, np.int64)
    within = inner[inner < length]
    origin[within] = within
    positions = np.arange(length, dtype=np.int64) - np.maximum.accumulate(origin)
    return Row(tokens[:-1].copy(), targets, positions, length)


def packed_row(documents: Iterable[Document], length: int, pad_id: int) -> Row:
    """A row of whole documents, padded at its end.

    Args:
        documents: Together they must fit.
        length: seq.
        pad_id: Fills what is left.
    """
    tokens = np.full(length, pad_id, np.int64)
    targets = np.full(length, IGNORE, np.int64)
    positions = np.zeros(length, np.int64)
    at = 0
    for ids, mask in documents:
        end = at + len(ids)
        tokens[at:end] = ids
        wanted = tokens[at + 1 : end]
        if mask is not None:
            wanted = np.where(np.asarray(mask)[1:], wanted, IGNORE)
        targets[at : end - 1] = wanted
        positions[at:end] = np.arange(len(ids))
        at = end
    positions[at:] = np.arange(length - at)
    return Row(tokens, targets, positions, at)


def best_fit(lengths: Array, capacity: int) -> list[list[int]]:
    """Puts items into bins: the longest first, each into the fullest bin that still takes it.

    Args:
        lengths: int64 [items]; items longer than `capacity` are left out.
        capacity: What a bin holds.

    Returns:
        The items of each bin.

    Source: best-fit decreasing, at most 11/9 of the fewest possible bins (Johnson, 1973).
    """
    bins: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # bins with this much room
    rooms: list[int] = []  # the ones that have bins, ascending
    order = np.argsort(-lengths, kind="stable")
    for item in order[np.searchsorted(-lengths[order], -capacity) :].tolist():
        size = int(lengths[item])
        place = bisect_left(rooms, size)
        if place == len(rooms):
            bins.append([])
            chosen, room = len(bins) - 1, capacity
        else:
            room = rooms[place]
            chosen = by_room[room].pop()
            if not by_room[room]:
                rooms.pop(place)
        bins[chosen].append(item)
        room -= size
        if room:
            if not by_room[room]:
                insort(rooms, room)
            by_room[room].append(chosen)
    return bins
