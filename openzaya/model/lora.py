"""Low-rank adapters of matrices (LoRA, arXiv 2106.09685, section 4.1).

W' = W + s B A, with A [rank, in] and B [out, rank]; every expert of a stack has its own A and B.
s = alpha / rank, or alpha / sqrt(rank) if rank-stabilised (arXiv 2312.03732, theorem 3.2).

With a magnitude m [out] the change is of the direction alone (DoRA, arXiv 2402.09353, equation 5):
W' = m (W + s B A) / ||W + s B A||, row by row. The norm counts as a constant in gradients, as
section 4.3 has it. Matrices only: no file format has magnitudes for stacks of experts.

An adapter is *kept* beside the weights (`attach`, `detach`), to train it or to try it, or *merged*
into them (`merge`, `merged`). Both compute W' by the same operation, in fp32 and rounded to the
dtype of W, so that they agree bit for bit. A kept adapter costs one product B A per forward and
matrix: merge it to serve.

Matrices are called by their logical names, which are the parameter names of `Zaya`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from openzaya.errors import UserError
from openzaya.model.config import ModelConfig
from openzaya.model.model import Zaya

_KINDS = {
    "attention": r"self_attn\.(?:qkv_proj\.)?(?:[qkvo]_proj|v_proj_current|v_proj_delayed)\.weight",
    "experts": r"mlp\.experts\.(?:gate_up_proj|down_proj)",
    "router": r"mlp\.gate\.(?:down_proj|out_proj|router_mlp\.(?:fc1|fc2|out_proj))\.weight",
}
"""What the logical names of adaptable matrices look like inside their block, by kind."""


@dataclass
class Pair:
    """The two factors of one matrix's change.

    Attributes:
        a: [rank, in], or [experts, rank, in] for a stack of experts; any float dtype.
        b: [out, rank], or [experts, out, rank].
        scale: s, which multiplies their product.
        magnitude: m, [out]; None without DoRA.
    """

    a: Tensor
    b: Tensor
    scale: float
    magnitude: Tensor | None = None

    @property
    def rank(self) -> int:
        """Inner size of the product."""
        return self.a.shape[-2]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix, [out, in] or [experts, out, in]."""
        return (*self.b.shape[:-1], self.a.shape[-1])

    def delta(self) -> Tensor:
        """The change s B A, [out, in] or [experts, out, in], in fp32."""
        return self.scale * (self.b.float() @ self.a.float())


@dataclass
class Adapter:
    """A set of pairs, and what was chosen for most of them.

    Either all pairs have magnitudes or none has.

    Attributes:
        pairs: by logical name.
        rank: default rank; a pair may have another.
        alpha: default numerator of the scale; a pair may have another.
        use_rslora: whether scales are alpha / sqrt(rank).
        base_model: name of the model that it adapts, for information.
    """

    pairs: dict[str, Pair]
    rank: int
    alpha: float
    use_rslora: bool = False
    base_model: str | None = None


def scale_of(rank: int, alpha: float, use_rslora: bool = False) -> float:
    """The factor s of a pair."""
    return alpha / (math.sqrt(rank) if use_rslora else rank)


def kind_of(name: str) -> str | None:
    """ "attention", "experts" or "router" for a matrix that can be adapted, else None."""
    match = re.fullmatch(r"model\.layers\.\d+\.(.+)", name)
    if match is None:
        return None
    return next((kind for kind, inner in _KINDS.items() if re.fullmatch(inner, match[1])), None)


def new_adapter(
    config: ModelConfig,
    targets: Iterable[str],
    rank: int,
    alpha: float,
    seed: int = 0,
    use_rslora: bool = False,
) -> Adapter:
    """A fresh adapter, which changes nothing yet: B is zero, A uniform within 1 / sqrt(in).

    Args:
        targets: kinds ("attention", "experts", "router"), logical names, or endings of logical
            names that begin at a dot, as "o_proj.weight" or "experts.down_proj".

    Raises:
        UserError: if the rank is not positive, or a target is unknown or cannot be adapted.
    """
    if rank < 1:
        raise UserError(f"the rank of an adapter must be at least 1, not {rank}.")
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Zaya(config).named_parameters()}
    chosen = {name for target in targets for name in _matching(target, list(shapes))}
    if not chosen:
        raise UserError("an adapter needs at least one target, such as 'attention'.")
    generator = torch.Generator().manual_seed(seed)
    scale = scale_of(rank, alpha, use_rslora)
    pairs = {}
    for name in (name for name in shapes if name in chosen):
        *experts, rows, columns = shapes[name]
        uniform = torch.rand(*experts, rank, columns, generator=generator)
        a = (2 * uniform - 1) / math.sqrt(columns)
        pairs[name] = Pair(a, torch.zeros(*experts, rows, rank), scale)
    return Adapter(pairs, rank, alpha, use_rslora)


def is_dora(adapter: Adapter) -> bool:
    """Whether the pairs have magnitudes."""
    return any(pair.magnitude is not None for pair in adapter.pairs.values())


@torch.no_grad()
def with_magnitudes(adapter: Adapter, model: Zaya) -> Adapter:
    """A fresh adapter as one of DoRA: m = ||W||, so that it still changes nothing.

    Raises:
        UserError: as `attach`, or if the adapter has stacks of experts.
    """
    pairs = {}
    for name, (module, attribute) in _check(model, adapter).items():
        if kind_of(name) == "experts":
            raise UserError(
                f"{name} cannot be adapted by DoRA: no file format has magnitudes for stacks of "
                "experts; adapt attention and router so, or take LoRA."
            )
        weight: Tensor = getattr(module, attribute)
        magnitude = weight.to(torch.promote_types(weight.dtype, torch.float32)).norm(dim=-1)
        pairs[name] = replace(adapter.pairs[name], magnitude=magnitude.float())
    return replace(adapter, pairs=pairs)


def _matching(target: str, names: list[str]) -> list[str]:
    if target in _KINDS:
        return [name for name in names if kind_of(name) == target]
    found = [name for name in names if name == target or name.endswith(f".{target}")]
    if not found:
        raise UserError(
            f"the model has no matrix {target!r}; targets are {', '.join(_KINDS)}, or names of "
            "matrices such as 'o_proj.weight'."
        )
    for name in found:
        if kind_of(name) is None:
            raise UserError(refusal(name))
    return found


def refusal(name: str) -> str:
    """What to tell a user who wants to adapt something else."""
    return (
        f"{name} cannot be adapted: only projections of attention, matrices of experts and "
        "matrices of the router can."
    )


class LowRank(nn.Module):
    """W -> W', as a parametrization of W; A, B and the magnitude are fp32 parameters.

    Args:
        pair: initial values, which are copied.
        weight: W, for its device.
        order: names of the parameters beside W, itself included, to be restored.

    Attributes:
        keep: factors of A's columns, [in] or [experts, 1, in], for dropout; None for none.
    """

    def __init__(self, pair: Pair, weight: Tensor, order: list[str]) -> None:
        super().__init__()
        self.a = nn.Parameter(pair.a.detach().to(weight.device, torch.float32, copy=True))
        self.b = nn.Parameter(pair.b.detach().to(weight.device, torch.float32, copy=True))
        self.magnitude = None
        if pair.magnitude is not None:
            magnitude = pair.magnitude.detach().to(weight.device, torch.float32, copy=True)
            self.magnitude = nn.Parameter(magnitude)
        self.scale = pair.scale
        self.keep: Tensor | None = None
        self.order = order
        self.was_trained = weight.requires_grad

    def forward(self, weight: Tensor) -> Tensor:
        """[out, in] or [experts, out, in], same dtype out; gradients flow to all of them."""
        a = self.a if self.keep is None else self.a * self.keep
        return _change(weight, a, self.b, self.scale, self.magnitude)


def _change(weight: Tensor, a: Tensor, b: Tensor, scale: float, magnitude: Tensor | None) -> Tensor:
    product = torch.baddbmm if weight.ndim == 3 else torch.addmm
    wide = torch.promote_types(weight.dtype, torch.float32)
    changed = product(weight.to(wide), b.to(wide), a.to(wide), alpha=scale)
    if magnitude is not None:
        length = changed.detach().norm(dim=-1).clamp_min(torch.finfo(wide).tiny)
        changed = changed * (magnitude.to(wide) / length)[..., None]
    return changed.to(weight.dtype)


def attach(model: Zaya, adapter: Adapter, freeze: bool = False) -> None:
    """Keep an adapter beside the weights of a model, whose values stay as they are.

    The factors become parameters of the model, in fp32; parameters of an adapted module change
    their names until `detach`, so save a model before or after, and cast it before.

    Args:
        freeze: stop training the adapted weights themselves.

    Raises:
        UserError: if a matrix is unknown, of another shape, or adapted already; nothing changes.
    """
    checked = _check(model, adapter)
    orders: dict[nn.Module, list[str]] = {}
    for module, _ in checked.values():
        orders.setdefault(module, [name for name, _ in module.named_parameters(recurse=False)])
    for name, (module, attribute) in checked.items():
        weight = getattr(module, attribute)
        change = LowRank(adapter.pairs[name], weight, orders[module])
        parametrize.register_parametrization(module, attribute, change, unsafe=True)
        if freeze:
            weight.requires_grad_(False)


def attached(model: Zaya) -> dict[str, Pair]:
    """Current pairs of a kept adapter by logical name, copied; none if there is no adapter."""
    return {
        name: Pair(
            change.a.detach().clone(),
            change.b.detach().clone(),
            change.scale,
            None if change.magnitude is None else change.magnitude.detach().clone(),
        )
        for name, _, _, change in kept(model)
    }


def detach(model: Zaya) -> None:
    """Take a kept adapter off again: the very parameters of before, in the same order."""
    found = kept(model)
    for _, module, attribute, change in found:
        parametrize.remove_parametrizations(module, attribute, leave_parametrized=False)
        getattr(module, attribute).requires_grad_(change.was_trained)
    for _, module, _, change in found:
        # The restored parameter would come last, and optimizers count on the order.
        for name in change.order:
            parameter = getattr(module, name)
            delattr(module, name)
            module.register_parameter(name, parameter)


@torch.no_grad()
def merge(model: Zaya, adapter: Adapter) -> None:
    """Add an adapter into the weights of a model, in place.

    Raises:
        UserError: if a matrix is unknown, of another shape, or has a kept adapter; nothing
            changes.
    """
    for name, (module, attribute) in _check(model, adapter).items():
        weight = getattr(module, attribute)
        weight.copy_(merged(name, weight, adapter))


@torch.no_grad()
def merged(name: str, tensor: Tensor, adapter: Adapter) -> Tensor:
    """One tensor of a model with an adapter added, as a converter needs it.

    Args:
        name: logical name of the tensor.
        tensor: [out, in] or [experts, out, in]; left as it is.

    Returns:
        The sum in the tensor's dtype, or the tensor itself where the adapter has no such name.

    Raises:
        UserError: if the pair is of another shape.
    """
    pair = adapter.pairs.get(name)
    if pair is None:
        return tensor
    check_shape(name, tensor.shape, pair)
    magnitude = None if pair.magnitude is None else pair.magnitude.to(tensor.device)
    a, b = pair.a.to(tensor.device), pair.b.to(tensor.device)
    return _change(tensor, a, b, pair.scale, magnitude)


def _check(model: Zaya, adapter: Adapter) -> dict[str, tuple[nn.Module, str]]:
    modules = dict(model.named_modules())
    checked = {}
    for name, pair in adapter.pairs.items():
        parent, _, attribute = name.rpartition(".")
        module = modules.get(parent)
        if module is None or not isinstance(getattr(module, attribute, None), Tensor):
            raise UserError(f"the adapter changes {name}, which the model has not.")
        if kind_of(name) is None:
            raise UserError(refusal(name))
        if parametrize.is_parametrized(module, attribute):
            raise UserError(f"{name} has an adapter already; detach that one first.")
        check_shape(name, getattr(module, attribute).shape, pair)
        checked[name] = module, attribute
    return checked


def check_shape(name: str, shape: Sequence[int], pair: Pair) -> None:
    """Check that a pair's product has the shape of the matrix.

    Raises:
        UserError: naming the matrix, if it has not.
    """
    if pair.shape != tuple(shape) or pair.a.shape[:-1] != (*pair.b.shape[:-2], pair.b.shape[-1]):
        raise UserError(
            f"the adapter of {name} has factors {list(pair.b.shape)} and {list(pair.a.shape)}, "
            f"which do not fit the model's {list(shape)}."
        )
    if pair.magnitude is not None and (len(shape) != 2 or pair.magnitude.shape != shape[:1]):
        raise UserError(
            f"the adapter of {name} has magnitudes {list(pair.magnitude.shape)}, which do not fit "
            f"the model's {list(shape)}."
        )


def kept(model: Zaya) -> list[tuple[str, nn.Module, str, LowRank]]:
    """The kept adapter: logical name, module, attribute and change of every adapted matrix."""
    return [
        (f"{path}.{attribute}", module, attribute, changes[0])
        for path, module in model.named_modules()
        if parametrize.is_parametrized(module)
        for attribute, changes in module.parametrizations.items()
        if isinstance(changes[0], LowRank)
    ]
