"""Golden traces: the numbers of every sub-layer of one forward, on inputs that anyone can derive.

Another implementation of the model runs the same probe, writes what it has under the same names
and compares (`trace_compare.py`): the first stage that differs is where its mistake is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from openzaya.kernels.native.library import written_out
from openzaya.model.attention import StandardAttention
from openzaya.model.block import Block
from openzaya.model.cca import CCAttention
from openzaya.model.config import ModelConfig
from openzaya.model.experts import MixtureOfExperts
from openzaya.model.layout import Layout, compact
from openzaya.model.model import Zaya
from openzaya.model.rope import rotate
from openzaya.model.router import Routing

_SHORTEST, _LONGEST = 20, 64
_MULTIPLIER, _MODULUS, _SEED = 16_807, 2**31 - 1, 123_456_789


@dataclass(frozen=True)
class Probe:
    """Inputs of a trace.

    Attributes:
        tokens: [rows, seq] int64.
        positions: [rows, seq] int64, restarting at 0 with each document; 0 on padding.
        padding_mask: [rows, seq] bool, True on real tokens.
    """

    tokens: Tensor
    positions: Tensor
    padding_mask: Tensor

    @property
    def documents(self) -> Tensor:
        """[rows, seq] int64: number of each token's document within its row; no use on padding."""
        return ((self.positions == 0) & self.padding_mask).cumsum(1)


def make_probe(config: ModelConfig) -> Probe:
    """The probe of a model: it depends on vocabulary, padding id and sliding window alone.

    Four rows of `seq` columns, where seq is twice the sliding window but from 20 to 64 (20 without
    a window): one document; one padded on the left by seq // 3; one padded on the right by
    seq // 4; and three documents of seq // 2, 1 and the remaining tokens. Positions restart at 0
    with each document.

    Token ids, by rows from the left, padding included: x starts at 123456789, and for each cell
    x = 16807 x mod (2^31 - 1), id = x mod (vocab_size - 1), plus one from pad_token_id on, so that
    no real token is padding. Cells of padding then get pad_token_id.
    """
    window = config.sliding_window if "hybrid_sliding" in config.types else None
    seq = min(max(_SHORTEST, 2 * (window or 0)), _LONGEST)
    x, ids = _SEED, []
    for _ in range(4 * seq):
        x = _MULTIPLIER * x % _MODULUS
        token = x % max(config.vocab_size - 1, 1)
        ids.append((token + (token >= config.pad_token_id)) % config.vocab_size)
    left, right, first = seq // 3, seq // 4, seq // 2
    mask = torch.ones(4, seq, dtype=torch.bool)
    mask[1, :left] = False
    mask[2, seq - right :] = False
    positions = torch.arange(seq).repeat(4, 1)
    positions[1] -= left
    positions[3, first:] -= first
    positions[3, first + 1 :] -= 1
    tokens = torch.tensor(ids).view(4, seq)
    return Probe(tokens.where(mask, config.pad_token_id), positions.where(mask, 0), mask)


def stages(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names of all stages in the order of computation, each with its shape after [rows, seq]."""
    width, dim = config.hidden_size, config.head_dim
    q, k = (config.num_attention_heads, dim), (config.num_key_value_heads, dim)
    classes = config.num_router_classes
    cca = ("projected", "convolved", "mixed", "normed", "rotated")
    kinds = cca if config.attention == "cca" else ("projected", "rotated")
    shapes: dict[str, tuple[int, ...]] = {"embedded": (width,)}
    for b in range(config.num_hidden_layers):
        layer: dict[str, tuple[int, ...]] = {"attention.input": (width,)}
        for kind in kinds:
            layer[f"attention.q_{kind}"], layer[f"attention.k_{kind}"] = q, k
        layer["attention.v"] = k
        layer["attention.context"] = (config.query_width,)
        layer["attention.output"] = layer["residual_attention"] = (width,)
        layer["router.input"] = (width,)
        if config.router == "zaya":
            layer["router.state"] = (config.router_hidden_size,)
        layer["router.probabilities"] = (classes,)
        layer["router.chosen"] = layer["router.weight"] = ()
        if classes > 1:
            layer["router.margin"] = ()
        if config.skip_expert != "none":
            layer["skip"] = ()
        layer["experts.output"] = layer["residual_experts"] = (width,)
        shapes |= {f"layers.{b}.{name}": shape for name, shape in layer.items()}
    return shapes | {"final_hidden": (width,), "logits": (config.vocab_size,)}


@torch.no_grad()
def capture(model: Zaya, probe: Probe) -> dict[str, Tensor]:
    """Run one uncached forward over the probe and keep every stage of it.

    Args:
        model: on any device.
        probe: its token ids must be inside the vocabulary.

    Returns:
        The tensors that `stages` lists, in that order, on the CPU; each [rows, seq, ...] in the
        dtype it was computed in, restored to the probe's arrangement and zero on padding.
        `router.chosen` is int64, `skip` bool, `router.weight` and `router.margin` fp32.
    """
    device = model.model.norm.weight.device
    tokens, positions, mask = (
        tensor.to(device) for tensor in (probe.tokens, probe.positions, probe.padding_mask)
    )
    watch = _Watch()
    try:
        watch.before(model.model.layers[0], watch.keep("embedded"))
        for b, block in enumerate(model.model.layers):
            assert isinstance(block, Block)
            _watch_block(watch, block, f"layers.{b}.", model.config)
        with written_out():
            output = model(tokens, positions, mask)
    finally:
        watch.remove()
    compaction = compact(mask)  # what the model does with padding before its first layer

    def restored(x: Tensor) -> Tensor:
        flat = x.reshape(*x.shape[:2], -1)
        return compaction.restore(flat).view(x.shape).to(x.dtype).cpu().contiguous()

    found = {name: restored(tensor) for name, tensor in watch.found.items()}
    found["final_hidden"] = output.hidden.cpu()
    found["logits"] = model.logits(output.hidden).cpu()
    return {name: found[name] for name in stages(model.config)}


class _Watch:
    """Hooks that collect stages of the forwards to come, in the model's own arrangement."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []

    def before(self, module: nn.Module, use: Callable[..., object]) -> None:
        """Call `use` with the arguments of each of the module's forwards."""
        hook = module.register_forward_pre_hook(lambda _, args: _discard(use(*args)))
        self._handles.append(hook)

    def after(self, module: nn.Module, use: Callable[[Any], object]) -> None:
        """Call `use` with the result of each of the module's forwards."""
        hook = module.register_forward_hook(lambda _, args, out: _discard(use(out)))
        self._handles.append(hook)

    def keep(self, name: str) -> Callable[..., object]:
        """A use that stores the first argument, or the result."""
        return lambda x, *others: self.found.update({name: x})

    def remove(self) -> None:
        """Leave the modules as they were."""
        for handle in self._handles:
            handle.remove()


def _discard(_: object) -> None:
    """What a hook returns would replace arguments or results."""


def _watch_block(watch: _Watch, block: Block, at: str, config: ModelConfig) -> None:
    attention = block.self_attn
    if isinstance(attention, CCAttention):
        _watch_cca(watch, attention, at + "attention.")
    else:
        _watch_standard(watch, attention, at + "attention.")
    watch.before(attention.o_proj, watch.keep(at + "attention.context"))
    watch.after(attention, watch.keep(at + "attention.output"))
    stream = at + "residual_attention"
    merged = block.post_attention_residual_scale
    watch.after(merged, lambda result: watch.found.update({stream: result[0]}))
    # Where the stream is rounded between merge and norm, this comes later and holds.
    watch.before(block.post_attention_layernorm, watch.keep(stream))
    watch.before(block.mlp.gate, watch.keep(at + "router.input"))
    _watch_experts(watch, block.mlp, at, config)
    watch.after(block, lambda result: watch.found.update({at + "residual_experts": result[0]}))


def _watch_cca(watch: _Watch, attention: CCAttention, at: str) -> None:
    """What no module boundary shows is computed again, by the model's own methods."""
    found, projection = watch.found, attention.qkv_proj
    layouts: list[Layout] = []

    def start(x: Tensor, layout: Layout, state: None) -> None:
        found[at + "input"] = x
        layouts[:] = [layout]

    def projected(result: tuple[Tensor, Tensor, Tensor]) -> None:
        q0, k0 = found[at + "q_projected"], found[at + "k_projected"]
        latent = torch.cat([q0, k0], dim=-1)
        convolved = projection.convolve(latent, layouts[0], None)
        found[at + "q_convolved"], found[at + "k_convolved"] = convolved
        found[at + "q_mixed"], found[at + "k_mixed"], found[at + "v"] = result
        found[at + "q_projected"] = q0.view_as(result[0])
        found[at + "k_projected"] = k0.view_as(result[1])

    def normed(result: tuple[Tensor, Tensor]) -> None:
        angles = layouts[0].angles[attention.layer_type]
        for name, x in zip("qk", result, strict=True):
            found[at + name + "_normed"] = x
            found[at + name + "_rotated"] = rotate(x, angles).to(layouts[0].dtype)

    watch.before(attention, start)
    watch.after(projection.q_proj, watch.keep(at + "q_projected"))
    watch.after(projection.k_proj, watch.keep(at + "k_projected"))
    watch.after(projection, projected)
    watch.after(attention.qk_norm, normed)


def _watch_standard(watch: _Watch, attention: StandardAttention, at: str) -> None:
    found = watch.found
    layouts: list[Layout] = []

    def start(x: Tensor, layout: Layout, state: None) -> None:
        found[at + "input"] = x
        layouts[:] = [layout]

    def heads(x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, attention.head_dim)

    def projected(name: str, x: Tensor) -> None:
        found[at + name + "_projected"] = heads(x)
        turned = rotate(heads(x).float(), layouts[0].angles[attention.layer_type])
        found[at + name + "_rotated"] = turned.to(x.dtype)

    watch.before(attention, start)
    watch.after(attention.q_proj, lambda x: projected("q", x))
    watch.after(attention.k_proj, lambda x: projected("k", x))
    watch.after(attention.v_proj, lambda x: found.update({at + "v": heads(x)}))


def _watch_experts(watch: _Watch, mlp: MixtureOfExperts, at: str, config: ModelConfig) -> None:
    found = watch.found

    def mixed(result: tuple[Tensor, Routing]) -> None:
        output, routing = result
        found[at + "experts.output"] = output
        found[at + "router.probabilities"] = routing.probabilities
        found[at + "router.chosen"], found[at + "router.weight"] = routing.chosen, routing.weight
        if routing.state is not None:
            found[at + "router.state"] = routing.state
        if config.num_router_classes > 1:
            biased = routing.probabilities + mlp.gate.balancing_biases
            best = biased.topk(2, dim=-1).values
            found[at + "router.margin"] = best[..., 0] - best[..., 1]
        if config.skip_expert != "none":
            found[at + "skip"] = routing.chosen == config.num_experts

    watch.after(mlp, mixed)
