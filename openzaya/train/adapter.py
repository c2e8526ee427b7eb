"""Training an adapter instead of the weights: what is frozen, saved, and proved at the first step.

Only the factors (and DoRA's magnitudes) are parameters; AdamW updates them. Muon would make every
update of a factor orthogonal, which for matrices of a few rows, one of which starts at zero, has no
published recipe. The base model is frozen, its balancing biases included, and not saved: a
checkpoint holds the adapter in PEFT's format beside the state of training.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from openzaya.checkpoint.lora import read_adapter, save_adapter
from openzaya.config.recipe import AdapterConfig
from openzaya.errors import UserError
from openzaya.model.lora import (
    Adapter,
    LowRank,
    attach,
    attached,
    kept,
    kind_of,
    new_adapter,
    with_magnitudes,
)
from openzaya.model.model import Zaya


def begin_adapter(model: Zaya, config: AdapterConfig, seed: int, base: str | None) -> Adapter:
    """Freeze a model and keep a fresh adapter beside it.

    Args:
        base: what the model was opened from, for the adapter's file.

    Raises:
        UserError: if a target is unknown or cannot be adapted so.
    """
    adapter = new_adapter(model.config, config.targets, config.rank, config.alpha, seed)
    if config.kind == "dora":
        adapter = with_magnitudes(adapter, model)
    model.requires_grad_(False)
    attach(model, adapter)
    return replace(adapter, base_model=base)


def save_kept(model: Zaya, adapter: Adapter, folder: Path) -> None:
    """Write the adapter that a model keeps into an existing folder.

    Args:
        adapter: what `begin_adapter` returned, for its settings.
    """
    save_adapter(replace(adapter, pairs=attached(model)), folder, model.config)


@torch.no_grad()
def load_kept(model: Zaya, folder: Path) -> None:
    """Put saved values into the adapter that a model keeps.

    Raises:
        UserError: if the file is damaged or has another adapter.
    """
    pairs = read_adapter(folder, model.config).pairs
    changes = {name: change for name, _, _, change in kept(model)}
    if pairs.keys() != changes.keys():
        raise UserError(f"{folder} holds an adapter of other matrices than the recipe's.")
    for name, pair in pairs.items():
        change = changes[name]
        change.a.copy_(pair.a)
        change.b.copy_(pair.b)
        if change.magnitude is not None and pair.magnitude is not None:
            change.magnitude.copy_(pair.magnitude)


def weights_digest(model: Zaya) -> int:
    """A checksum of all weights, to tell whether a run goes on from the base that it began with."""
    digest = 0
    for _, tensor in sorted(model.state_dict().items()):
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest = zlib.crc32(data.numpy().data, digest)
    return digest


@contextmanager
def dropped_inputs(model: Zaya, rate: float, generator: torch.Generator) -> Iterator[None]:
    """Dropout of adapters' inputs inside the block, the forward and its backward.

    As factors are added to weights, a channel is dropped for all tokens of the forward alike
    (arXiv 1512.05287), where PEFT draws for each token anew: the expectation is the same.
    """
    changes: list[LowRank] = [change for _, _, _, change in kept(model)] if rate else []
    for change in changes:
        shape = (*change.a.shape[:-2], 1, change.a.shape[-1])
        drawn = torch.rand(shape, generator=generator) >= rate
        change.keep = (drawn / (1 - rate)).to(change.a.device)
    try:
        yield
    finally:
        for change in changes:
            change.keep = None


def prove_gradients(model: Zaya, load: Tensor, side: str) -> dict[str, float]:
    """Gradient norms by kind of target: the smallest that a matrix has.

    At the first step B is zero and A has no gradient yet, but every B must have one; from the
    second step on so must A. What gets none would silently stay as it is.

    Args:
        load: [layers, classes] tokens of the global batch by class; a stack of experts of which no
            expert got a token is left out.
        side: "b" or "a".

    Raises:
        UserError: naming the first matrix without any gradient.
    """
    smallest: dict[str, float] = {}
    for name, _, _, change in kept(model):
        kind = str(kind_of(name))
        if side == "a" and not bool(change.b.any()):
            continue
        if kind == "experts" and not bool(load[int(name.split(".")[2]), : len(change.b)].any()):
            continue
        gradient = change.b.grad if side == "b" else change.a.grad
        norm = 0.0 if gradient is None else float(gradient.norm())
        if norm == 0:
            raise UserError(
                f"the adapter of {name} gets no gradient (factor {side.upper()}): it would never "
                "learn. Check that batches have tokens to learn (loss_on, context) that reach it, "
                "or take it out of adapter.targets."
            )
        smallest[kind] = min(norm, smallest.get(kind, norm))
    return smallest
