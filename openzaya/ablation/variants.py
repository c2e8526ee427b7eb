"""Five models of one size: a standard MoE, each of MoE++'s parts alone, and all three.

Standard is grouped-query attention, a linear router and a plain residual sum. The parts are CCA
(arXiv 2510.04476), the ZAYA router with depth averaging, and residual scaling (arXiv 2605.05365).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from openzaya.errors import UserError
from openzaya.model.accounting import count_parameters
from openzaya.model.config import ModelConfig

BASELINE, FULL = "standard", "moe++"

VARIANTS: dict[str, dict[str, str]] = {
    BASELINE: {"attention": "standard", "router": "linear", "residual": "plain"},
    "cca": {"attention": "cca", "router": "linear", "residual": "plain"},
    "router": {"attention": "standard", "router": "zaya", "residual": "plain"},
    "residual": {"attention": "standard", "router": "linear", "residual": "scaled"},
    FULL: {"attention": "cca", "router": "zaya", "residual": "scaled"},
}
"""What each variant changes in a `ModelConfig`."""

TOLERANCE = 0.01
"""Largest difference of total and of active parameters, without embeddings, to the baseline's."""

_NEARNESS = 0.02
"""What a router state e times its planned width weighs, as a share of the active parameters."""


def matched(config: ModelConfig, variant: str) -> ModelConfig:
    """The variant of a standard MoE with as many total and active parameters as that one has.

    Only the width of heads and that of the ZAYA router's state are adjusted. Experts stay as they
    are: of E experts, a change of the inner width moves the total E times as far as the active
    count, so it can never mend both. Numbers of heads stay too, as the values of CCA's kv heads
    have different roles. Head widths move in steps of 2 for RoPE; the router's state is the fine
    adjustment, and of those that match about equally well the nearest to the planned width is
    taken. Residual scaling has nothing to adjust: where it is alone, its 8E + 2E/L parameters a
    layer are the difference.

    Args:
        config: the standard MoE; its `router_hidden_size` is what a ZAYA router should be near.
        variant: a key of `VARIANTS`.

    Raises:
        UserError: if no width comes within `TOLERANCE`.
    """
    kinds = VARIANTS[variant]
    target = _active(_with(config, VARIANTS[BASELINE]))
    best, best_cost = None, math.inf
    for candidate in _candidates(_with(config, kinds)):
        away = abs(math.log(candidate.router_hidden_size / config.router_hidden_size))
        cost = abs(_active(candidate) / target - 1) + _NEARNESS * away
        if cost < best_cost:
            best, best_cost = candidate, cost
    if best is None or max(abs(d) for d in mismatch(best, config)) > TOLERANCE:
        raise UserError(
            f"variant {variant!r} cannot be matched with a standard MoE of width "
            f"{config.hidden_size} and head width {config.head_dim} within {TOLERANCE:.0%} of its "
            "parameters; a wider model, other head widths or wider experts can be"
        )
    return ModelConfig.model_validate(best.model_dump())


def mismatch(config: ModelConfig, baseline: ModelConfig) -> tuple[float, float]:
    """Relative differences of total and active parameters, without embeddings, to a baseline's."""
    ours, theirs = count_parameters(config), count_parameters(_with(baseline, VARIANTS[BASELINE]))
    return (
        ours.total_without_embeddings / theirs.total_without_embeddings - 1,
        ours.active_without_embeddings / theirs.active_without_embeddings - 1,
    )


def sized(config: ModelConfig, width: int) -> ModelConfig:
    """The standard MoE of another width, such that every variant can be matched with it.

    Depth, inner width (to a multiple of 16) and router state follow the width in proportion, so
    that all sizes have one shape. So does the head width, to the nearest even number at which all
    of `VARIANTS` match.

    Raises:
        UserError: if there is none between half and twice that head width.
    """
    ratio = width / config.hidden_size
    wanted = config.head_dim * ratio
    scaled = _with(
        config,
        {
            **VARIANTS[BASELINE],
            "hidden_size": width,
            "num_hidden_layers": max(round(config.num_hidden_layers * ratio), 1),
            "moe_intermediate_size": max(round(config.moe_intermediate_size * ratio / 16), 1) * 16,
            "router_hidden_size": max(round(config.router_hidden_size * ratio / 2), 1) * 2,
        },
    )
    widths = range(max(int(wanted / 2) // 2 * 2, 2), int(2 * wanted) + 1, 2)
    for head_dim in sorted(widths, key=lambda w: abs(w - wanted)):
        candidate = _with(scaled, {"head_dim": head_dim})
        if _turns(candidate) and _all_match(candidate):
            return ModelConfig.model_validate(candidate.model_dump())
    raise UserError(
        f"size {width}: no head width gives {len(VARIANTS)} variants of equal parameters (within "
        f"{TOLERANCE:.0%}); take a wider model, or wider experts (model.moe_intermediate_size)"
    )


def _all_match(config: ModelConfig) -> bool:
    try:
        for variant in VARIANTS:
            matched(config, variant)
    except UserError:
        return False
    return True


def _candidates(config: ModelConfig) -> Iterator[ModelConfig]:
    """The configuration in all widths that matching may choose."""
    if config.attention == "standard" and config.router == "linear":
        yield config
        return
    states = [config.router_hidden_size]
    if config.router == "zaya":
        state = config.router_hidden_size
        states = list(range(max(state // 4 * 2, 2), 2 * state + 1, 2))
    for head_dim in range(2, 2 * config.head_dim + 1, 2):
        if _turns(_with(config, {"head_dim": head_dim})):
            for state in states:
                yield _with(config, {"head_dim": head_dim, "router_hidden_size": state})


def _turns(config: ModelConfig) -> bool:
    """Whether RoPE can pair the channels."""
    return config.rotary_dim % 2 == 0


def _with(config: ModelConfig, update: dict[str, Any]) -> ModelConfig:
    return config.model_copy(update=update)


def _active(config: ModelConfig) -> int:
    return count_parameters(config).active_without_embeddings
