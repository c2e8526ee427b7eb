"""The controller that keeps experts evenly loaded (arXiv 2605.05365, section II).

Each router adds a bias to its probabilities before it chooses. The bias is no parameter of the
loss: its "gradient" is the load share minus the target share, over the whole global batch, fed to
AdamW once per optimizer step. Counts are integers, so that the result does not depend on how the
batch was cut into micro-batches or ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import AdamW

from openzaya.config.recipe import BalanceConfig
from openzaya.model.model import Zaya


class BalancingController:
    """Moves the balancing biases of all layers of a model.

    Args:
        model: its routers' buffers are changed in place.
        config: learning rate, betas, and the skip class's target share.
    """

    def __init__(self, model: Zaya, config: BalanceConfig) -> None:
        self._config = config
        self._num_experts = model.config.num_experts
        self._model = model
        # AdamW wants leaves of its own; the buffers receive copies after each update.
        self.biases = torch.nn.Parameter(torch.stack(self._buffers()).clone())
        self.optimizer = AdamW(
            [self.biases],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=1e-8,
            weight_decay=0.0,
        )

    @torch.no_grad()
    def update(self, load: Tensor) -> None:
        """Take one step.

        Args:
            load: [layers, classes] int64, tokens of the whole global batch by chosen class; the
                last class is the skip class, where the model has one.
        """
        if not self._config.enabled:
            return
        share = load / load.sum(1, keepdim=True)
        target = torch.full_like(share, (1 - self._config.skip_share) / self._num_experts)
        target[:, self._num_experts :] = self._config.skip_share
        error = share - target
        if self._config.skip_share == 0:  # held where it is: a zero gradient moves nothing
            error[:, self._num_experts :] = 0
        self.biases.grad = error.to(self.biases)
        self.optimizer.step()
        self._publish()

    def restore(self) -> None:
        """Take over biases that were loaded into the model (optimizer state loads apart)."""
        with torch.no_grad():
            self.biases.copy_(torch.stack(self._buffers()))

    def _buffers(self) -> list[Tensor]:
        buffers = self._model.named_buffers()
        return [buffer for name, buffer in buffers if name.endswith("balancing_biases")]

    def _publish(self) -> None:
        for buffer, value in zip(self._buffers(), self.biases.detach(), strict=True):
            buffer.copy_(value)


def load_entropy(load: Tensor, num_experts: int) -> Tensor:
    """Normalised entropy of the load over the experts, per layer: 1 is perfectly even.

    Args:
        load: [layers, classes] int64; classes after `num_experts` (the skip class) are left out.

    Returns:
        [layers] fp32 in 0..1.
    """
    share = load[:, :num_experts].double()
    share = share / share.sum(1, keepdim=True).clamp_min(1)
    entropy = -(share * share.clamp_min(1e-300).log()).sum(1)
    return (entropy / torch.tensor(max(num_experts, 2)).double().log()).float()
