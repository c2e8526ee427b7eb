"""Muon: momentum, orthogonalised (Keller Jordan 2024; RMS matching of arXiv 2502.16982).

Our own because torch's takes 2-D parameters only: here a stack of matrices, [..., m, n], is
updated matrix by matrix, so that the experts of one layer, or the gate and up halves of their
first weight, are each orthogonalised alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from openzaya.config.recipe import MAX_DECAY_BFLOAT16
from openzaya.optim.newton_schulz import newton_schulz

RMS_MATCH = 0.2
"""0.2 * sqrt(max(m, n)) gives an update the typical RMS of AdamW's, so one learning rate serves
both optimizers."""

STACK_ELEMENTS = {"cpu": 2**22}
"""Elements of one stack of matrices by kind of device: on a CPU all that an iteration touches
stays in the cache. Elsewhere the stack only bounds the memory that a step takes on top."""
STACK_ELEMENTS_ELSEWHERE = 2**26


class Muon(Optimizer):
    """Muon over matrices and stacks of matrices.

    Args:
        params: groups of parameters [..., m, n], contiguous. A group's `split` cuts the rows of its
            parameters into that many matrices (2 for stacked gate and up halves).
        lr: learning rate, on AdamW's scale.
        momentum: decay of the momentum buffer, a running mean of gradients; with 0 there is none.
        nesterov: look one step ahead.
        weight_decay: decoupled, times lr.
        steps: Newton-Schulz iterations.
        dtype: dtype of the Newton-Schulz products.
        momentum_dtype: dtype that the momentum buffer is kept in; its arithmetic is fp32.

    Raises:
        ValueError: for a parameter with fewer than two axes, rows that `split` does not divide, or
            a momentum that bf16 cannot hold.
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
        momentum_dtype: torch.dtype = torch.float32,
    ) -> None:
        if momentum_dtype == torch.bfloat16 and momentum > MAX_DECAY_BFLOAT16:
            raise ValueError(f"momentum {momentum}: in bf16 it needs at most {MAX_DECAY_BFLOAT16}")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "split": 1,
        }
        self._steps = steps
        self._dtype = dtype
        self._momentum_dtype = momentum_dtype
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
        for group in self.param_groups:
            same_shape: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                same_shape[p.shape[-2] // group["split"], p.shape[-1]].append(p)
                if group["momentum"] and "momentum" not in self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p, dtype=self._momentum_dtype)
            for (rows, columns), parameters in same_shape.items():
                device = parameters[0].device.type
                elements = STACK_ELEMENTS.get(device, STACK_ELEMENTS_ELSEWHERE)
                limit = max(1, elements // (rows * columns))
                counts = [p.numel() // (rows * columns) for p in parameters]
                for pieces in _stacks(counts, limit):
                    self._update([(parameters[i], part) for i, part in pieces], group, columns)

    def _update(
        self, pieces: Sequence[tuple[Tensor, slice]], group: dict[str, Any], columns: int
    ) -> None:
        """One batched iteration for many matrices of a shape: few, large products.

        Args:
            pieces: a parameter and the range of its matrices; together one stack.
        """

        def matrices(whole: Tensor, part: slice) -> Tensor:
            return whole.view(-1, whole.shape[-2] // group["split"], columns)[part]

        weights = [matrices(p, part) for p, part in pieces]
        grads = [
            torch.zeros_like(w, dtype=torch.float32)
            if p.grad is None
            else matrices(p.grad.contiguous(), part).float()
            for w, (p, part) in zip(weights, pieces, strict=True)
        ]
        sizes = [len(w) for w in weights]
        stack = grads[0].new_empty(sum(sizes), *weights[0].shape[1:])
        directions = stack.split(sizes)
        momentum = group["momentum"]
        if momentum:
            kept = [matrices(self.state[p]["momentum"], part) for p, part in pieces]
            means = [buffer.float() for buffer in kept]  # the buffers themselves where fp32
            torch._foreach_lerp_(means, grads, 1 - momentum)
            torch._foreach_copy_(kept, means)
            for direction, grad, mean in zip(directions, grads, means, strict=True):
                if group["nesterov"]:
                    torch.lerp(grad, mean, momentum, out=direction)
                else:
                    direction.copy_(mean)
        else:
            torch._foreach_copy_(directions, grads)
        whitened = newton_schulz(stack, self._steps, self._dtype)
        size = RMS_MATCH * max(stack.shape[1:]) ** 0.5
        for w, part in zip(weights, whitened.split(sizes), strict=True):
            w.mul_(1 - group["lr"] * group["weight_decay"])
            w.add_(part, alpha=-group["lr"] * size)


def _stacks(counts: Sequence[int], limit: int) -> Iterator[list[tuple[int, slice]]]:
    """Cut parameters into stacks of `limit` matrices; the last one may be smaller.

    Args:
        counts: matrices of each parameter.

    Yields:
        (index of a parameter, range of its matrices) of all that one stack takes.
    """
    stack: list[tuple[int, slice]] = []
    room = limit
    for index, count in enumerate(counts):
        first = 0
        while first < count:
            last = min(first + room, count)
            stack.append((index, slice(first, last)))
            room -= last - first
            first = last
            if not room:
                yield stack
                stack, room = [], limit
    if stack:
        yield stack
