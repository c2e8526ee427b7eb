"""Activation checkpointing: what a forward computes is dropped, and the backward computes it again.

It is exact here because nothing is hidden: a layer's inputs and outputs are the residual stream and
the router state, and the second run takes the experts that the first one chose instead of choosing
again. A rounding error can therefore not send a token elsewhere, and loads are counted once, from
the first run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from openzaya.model.router import Routing

Recompute = Literal["none", "attention", "experts", "full"]
"""What is computed twice: nothing, one kind of sub-layer, or whole layers."""

_Result = TypeVar("_Result")


def twice(run: Callable[..., _Result], *inputs: Any) -> _Result:
    """`run(*inputs)` without keeping what it computes for the backward; it runs again there."""
    result: _Result = checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)
    return result


def twice_routed(
    run: Callable[..., tuple[Tensor, Routing]], *inputs: Tensor | None
) -> tuple[Tensor, Routing]:
    """The same of something that routes: `run(*inputs, chosen)`, `chosen` being None at first."""
    chosen: Tensor | None = None

    def routed(*inputs: Tensor | None) -> tuple[Tensor, Routing]:
        nonlocal chosen
        out, routing = run(*inputs, chosen)
        chosen = routing.chosen
        return out, routing

    return twice(routed, *inputs)
