"""Everything of a run that must survive a restart, and how it goes to disk and back.

The data cursor is the step number: the batch of a step is a pure function of recipe and step.
Nothing is pickled: tensors are safetensors, the rest is JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer

import openzaya
from openzaya.checkpoint.load import read_tensors, read_weights
from openzaya.checkpoint.save import save_model
from openzaya.config.recipe import Recipe
from openzaya.errors import UserError
from openzaya.model.lora import Adapter
from openzaya.model.model import Zaya
from openzaya.optim.balance import BalancingController
from openzaya.optim.groups import build_adapter_optimizer, build_optimizers
from openzaya.train.adapter import begin_adapter, load_kept, save_kept, weights_digest

TENSORS = "training.safetensors"
SCALARS = "training.json"


@dataclass
class TrainState:
    """A run between two optimizer steps.

    Attributes:
        model: with fp32 master weights.
        optimizers: by name.
        controller: of the balancing biases, with its own optimizer state.
        step: optimizer steps done.
        tokens: real tokens trained on.
        adapter: settings of the adapter that is trained; None if all weights are.
        base: checksum of the frozen weights under it.
    """

    model: Zaya
    optimizers: dict[str, Optimizer]
    controller: BalancingController
    step: int = 0
    tokens: int = 0
    adapter: Adapter | None = None
    base: int = 0

    @classmethod
    def create(cls, model: Zaya, recipe: Recipe) -> TrainState:
        """State before step 1 of a model whose weights are set."""
        if recipe.adapter is not None:
            base = weights_digest(model)
            adapter = begin_adapter(model, recipe.adapter, recipe.seed, recipe.start_from)
            return cls(
                model,
                build_adapter_optimizer(model, recipe.optimizer),
                BalancingController(model, recipe.balance.model_copy(update={"enabled": False})),
                adapter=adapter,
                base=base,
            )
        return cls(
            model,
            build_optimizers(model, recipe.optimizer),
            BalancingController(model, recipe.balance),
        )

    def save(self, folder: Path) -> None:
        """Write into an existing folder (make it with `atomic_folder`)."""
        if self.adapter is None:
            save_model(self.model, folder)
        else:
            save_kept(self.model, self.adapter, folder)
        save_file(self._tensors(), folder / TENSORS)
        scalars = {
            "step": self.step,
            "tokens": self.tokens,
            "base": self.base,
            "openzaya": openzaya.__version__,
            "torch": torch.__version__,
        }
        (folder / SCALARS).write_text(json.dumps(scalars, indent=1) + "\n")

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote.

        Raises:
            UserError: if the checkpoint is of another model or optimizer, or incomplete.
        """
        try:
            scalars = json.loads((folder / SCALARS).read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"{folder} holds no training state: {error}") from error
        if self.adapter is None:
            self._load_weights(folder)
        elif scalars.get("base") != self.base:
            raise UserError(
                "start_from does not hold the weights that this run began with: restore them, or "
                "start a run of another name (name=...)."
            )
        else:
            load_kept(self.model, folder)
        tensors = read_tensors(folder / TENSORS)
        torch.set_rng_state(tensors.pop("rng.torch"))
        for label, optimizer, names in self._optimizers():
            for parameter, name in names.items():
                prefix = f"{label}/{name}/"
                entries = {
                    key.removeprefix(prefix): tensors.pop(key)
                    for key in list(tensors)
                    if key.startswith(prefix)
                }
                if entries:
                    device = parameter.device
                    optimizer.state[parameter] = {k: v.to(device) for k, v in entries.items()}
        if tensors:
            raise UserError(
                f"{folder} was trained with another optimizer: nothing here takes "
                f"{sorted(tensors)[0]!r}."
            )
        self.controller.restore()
        self.step = scalars["step"]
        self.tokens = scalars["tokens"]

    def _load_weights(self, folder: Path) -> None:
        saved, weights = read_weights(folder)
        ours = self.model.config
        self.model.load_state_dict(weights)
        self.model.config = ours.model_copy(
            update={
                "rope_theta": saved.rope_theta,
                "max_position_embeddings": saved.max_position_embeddings,
            }
        )

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {"rng.torch": torch.get_rng_state()}
        for label, optimizer, names in self._optimizers():
            for parameter, name in names.items():
                for key, value in optimizer.state.get(parameter, {}).items():
                    tensors[f"{label}/{name}/{key}"] = value.detach().contiguous()
        return tensors

    def _optimizers(self) -> list[tuple[str, Optimizer, dict[Tensor, str]]]:
        names: dict[Tensor, str] = {p: name for name, p in self.model.named_parameters()}
        result = []
        for label, optimizer in self.optimizers.items():
            own = [p for group in optimizer.param_groups for p in group["params"]]
            result.append((label, optimizer, {p: names[p] for p in own}))
        result.append(("balance", self.controller.optimizer, {self.controller.biases: "biases"}))
        return result
