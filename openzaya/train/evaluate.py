"""Held-out loss."""

from __future__ import annotations

import torch

from openzaya.data.packing import Batch
from openzaya.model.model import Zaya
from openzaya.train.stop import StopRequest


@torch.no_grad()
def heldout_loss(
    model: Zaya, batch: Batch, micro_sequences: int, stop: StopRequest | None = None
) -> float | None:
    """Mean loss in nats per token with a target.

    Args:
        batch: [batch, seq] held-out sequences.
        micro_sequences: rows of one forward.
        stop: ends the evaluation early when a signal has come.

    Returns:
        The loss, or None if stopped.
    """
    total = torch.zeros((), dtype=torch.float64)
    for start in range(0, batch.tokens.shape[0], micro_sequences):
        if stop is not None and stop.requested:
            return None
        rows = slice(start, start + micro_sequences)
        device = model.head_weight.device
        out = model(batch.tokens[rows].to(device), positions=batch.positions[rows].to(device))
        total += model.loss(out.hidden, batch.targets[rows].to(device)).double().cpu()
    return float(total / (batch.targets >= 0).sum().clamp_min(1))
