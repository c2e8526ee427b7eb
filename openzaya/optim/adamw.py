"""AdamW (arXiv 1711.05101) with moments kept in bf16; with fp32 moments torch's own is used.

A running mean that forgets 1 - beta a step must be able to move by that much: bf16 keeps 8 bits, so
a step of less than 1/256 is rounded away, and with beta2 = 0.999 the second moment would never
come down again. `MAX_DECAY_BFLOAT16` keeps a distance from that.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from openzaya.config.recipe import MAX_DECAY_BFLOAT16

_PIECE = 2**20


class BF16AdamW(Optimizer):
    """AdamW whose moments are kept in bf16; arithmetic and weights are as in torch's.

    Args:
        params: parameters, contiguous.
        lr: learning rate.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled, times lr.

    Raises:
        ValueError: for a beta that bf16 cannot hold.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if max(betas) > MAX_DECAY_BFLOAT16:
            raise ValueError(f"betas {betas}: moments in bf16 need at most {MAX_DECAY_BFLOAT16}")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"] = torch.zeros_like(p, dtype=torch.bfloat16)
                    state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.bfloat16)
                state["step"] += 1
                step = float(state["step"])
                scale = group["lr"] / (1 - beta1**step)
                root = (1 - beta2**step) ** 0.5
                # In pieces, so that the fp32 copies of large embeddings take no room.
                tensors = (p, p.grad.contiguous(), state["exp_avg"], state["exp_avg_sq"])
                for w, g, m, v in zip(*(t.view(-1).split(_PIECE) for t in tensors), strict=True):
                    grad = g.float()
                    mean = m.float().lerp_(grad, 1 - beta1)
                    square = v.float().mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                    m.copy_(mean)
                    v.copy_(square)
                    w.mul_(1 - group["lr"] * group["weight_decay"])
                    w.addcdiv_(mean, square.sqrt_().div_(root).add_(group["eps"]), value=-scale)
