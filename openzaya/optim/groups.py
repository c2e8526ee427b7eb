"""Which optimizer updates which parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from openzaya.config.recipe import OptimizerConfig
from openzaya.optim.adamw import BF16AdamW
from openzaya.optim.muon import Muon


@dataclass
class ParameterGroups:
    """Names of parameters by how they are updated.

    Attributes:
        hidden: matrices and stacks of matrices inside the network, without the next.
        gate_up: expert weights whose rows are two stacked matrices.
        rest: embeddings, LM head, convolutions, norms, biases, temperatures, scales, and the
            router's last projection.
    """

    hidden: list[str]
    gate_up: list[str]
    rest: list[str]


def parameter_groups(model: nn.Module) -> ParameterGroups:
    """Sort a model's parameters. Queries, keys and values are separate parameters already."""
    groups = ParameterGroups([], [], [])
    for name, parameter in model.named_parameters():
        last_projection = "mlp.gate" in name and "out_proj" in name
        vocabulary = "embed_tokens" in name or "lm_head" in name
        if parameter.ndim < 2 or "conv_qk" in name or vocabulary or last_projection:
            groups.rest.append(name)
        elif "gate_up_proj" in name:
            groups.gate_up.append(name)
        else:
            groups.hidden.append(name)
    return groups


def build_adapter_optimizer(model: nn.Module, config: OptimizerConfig) -> dict[str, Optimizer]:
    """The one optimizer, "adapter" (AdamW), of a frozen model that keeps an adapter."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    betas = (config.adamw_beta1, config.adamw_beta2)
    decay = config.adamw_weight_decay
    return {
        "adapter": AdamW(
            parameters, betas=betas, eps=config.adamw_eps, weight_decay=decay, fused=True
        )
    }


def build_optimizers(model: nn.Module, config: OptimizerConfig) -> dict[str, Optimizer]:
    """Optimizers of a model, by name: "hidden" (Muon or AdamW) and "rest" (AdamW).

    Learning rates are set before every step by the trainer.
    """
    parameters = dict(model.named_parameters())
    names = parameter_groups(model)
    rest = _adamw([parameters[n] for n in names.rest], config, config.adamw_weight_decay)
    if config.hidden == "adamw":
        matrices = [parameters[n] for n in (*names.hidden, *names.gate_up)]
        return {"hidden": _adamw(matrices, config, config.weight_decay), "rest": rest}
    muon = Muon(
        [
            {"params": [parameters[n] for n in names.hidden]},
            {"params": [parameters[n] for n in names.gate_up], "split": 2},
        ],
        momentum=config.momentum,
        nesterov=config.nesterov,
        weight_decay=config.weight_decay,
        steps=config.newton_schulz_steps,
        dtype=getattr(torch, config.newton_schulz_dtype),
        momentum_dtype=getattr(torch, config.momentum_dtype),
    )
    return {"hidden": muon, "rest": rest}


def _adamw(
    parameters: Sequence[nn.Parameter], config: OptimizerConfig, weight_decay: float
) -> Optimizer:
    """torch's, or ours for moments in bf16."""
    betas = (config.adamw_beta1, config.adamw_beta2)
    if config.adamw_state_dtype == "float32":
        return AdamW(
            parameters, betas=betas, eps=config.adamw_eps, weight_decay=weight_decay, fused=True
        )
    return BF16AdamW(parameters, betas=betas, eps=config.adamw_eps, weight_decay=weight_decay)
