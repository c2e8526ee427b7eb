"""Muon: momentum, orthogonalised (Keller Jordan 2024; RMS matching of arXiv 2502.16982).

Our own because torch's takes 2-D parameters only: here a stack of matrices, [..., m, n], is
updated matrix by matrix, so that the experts of one layer, or the gate and up halves of their
first weight, are each orthogonalised alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from openzaya.optim.newton_schulz import newton_schulz

RMS_MATCH = 0.2
"""0.2 * sqrt(max(m, n)) gives an update the typical RMS of AdamW's, so one learning rate serves
both optimizers."""


class Muon(Optimizer):
    """Muon over matrices and stacks of matrices.

    Args:
        params: groups of parameters [..., m, n]. A group's `split` cuts the rows of its
            parameters into that many matrices (2 for stacked gate and up halves).
        lr: learning rate, on AdamW's scale.
        momentum: decay of the momentum buffer.
        nesterov: look one step ahead.
        weight_decay: decoupled, times lr.
        steps: Newton-Schulz iterations.
        dtype: dtype of the Newton-Schulz products.

    Raises:
        ValueError: for a parameter with fewer than two axes, or rows that `split` does not divide.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        steps: int = 5,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "split": 1,
        }
        self._steps = steps
        self._dtype = dtype
        super().__init__(params, defaults)
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim < 2 or p.shape[-2] % group["split"]:
                    raise ValueError(
                        f"Muon takes matrices whose rows divide by {group['split']}, "
                        f"got shape {list(p.shape)}"
                    )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters; one without a gradient counts as having a zero gradient."""
        same_shape: dict[tuple[int, int], list[tuple[Tensor, Tensor, dict[str, Any]]]]
        same_shape = defaultdict(list)
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p, dtype=torch.float32)
                buffer = state["momentum"]
                grad = torch.zeros_like(buffer) if p.grad is None else p.grad.float()
                buffer.lerp_(grad, 1 - group["momentum"])
                update = grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
                rows, columns = p.shape[-2] // group["split"], p.shape[-1]
                same_shape[rows, columns].append((update.view(-1, rows, columns), p, group))
        # One batched iteration for all matrices of a shape: far fewer, larger products.
        for (rows, columns), entries in same_shape.items():
            stacked = torch.cat([update for update, _, _ in entries])
            whitened = newton_schulz(stacked, self._steps, self._dtype)
            scale = RMS_MATCH * max(rows, columns) ** 0.5
            sizes = [update.shape[0] for update, _, _ in entries]
            for part, (_, p, group) in zip(whitened.split(sizes), entries, strict=True):
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(part.reshape(p.shape).to(p.dtype), alpha=-group["lr"] * scale)
