"""The language model: embedding, layers, final norm, tied head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from openzaya.kernels.cross_entropy import linear_cross_entropy
from openzaya.model.block import Block
from openzaya.model.config import ModelConfig
from openzaya.model.layers import RMSNorm
from openzaya.model.layout import Layout, build_layout, compact
from openzaya.model.recompute import Recompute, twice_routed
from openzaya.model.router import Routing
from openzaya.model.state import LayerState, SequenceState

_HEAD_ROWS = 16_384
"""Rows of a low-precision LM head that are widened to fp32 at once."""


@dataclass
class Output:
    """Result of one forward.

    Attributes:
        hidden: [batch, seq, hidden] after the final norm, in the compute dtype; zero on padding.
        load: [layers, classes] int64, tokens routed to each class, padding not counted; the last
            class is the skip class, where the model has one.
        routing: one per layer, in the arrangement of the *compacted* batch (see `layout.py`);
            only on request.
    """

    hidden: Tensor
    load: Tensor
    routing: list[Routing] | None = None


class Backbone(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(width, config.rms_norm_eps)
        scaled = config.residual == "scaled"
        self.input_hidden_states_scale = nn.Parameter(torch.ones(width)) if scaled else None
        self.input_hidden_states_bias = nn.Parameter(torch.zeros(width)) if scaled else None

    def embed(self, tokens: Tensor) -> Tensor:
        """[batch, seq] int64 -> the fp32 residual stream [batch, seq, hidden]."""
        stream = self.embed_tokens(tokens).float()
        if self.input_hidden_states_scale is None or self.input_hidden_states_bias is None:
            return stream
        return (stream + self.input_hidden_states_bias) * self.input_hidden_states_scale


class Zaya(nn.Module):
    """A ZAYA1-style causal language model.

    Parameter names are those of the native checkpoint dialect. `config.rope_theta` may be changed
    between training phases with `set_context`.

    Args:
        config: the architecture.
        compute_dtype: dtype of matrix products; everything in `precision.py` stays fp32.

    Attributes:
        recompute: what a forward computes again for the backward instead of keeping it.
    """

    def __init__(self, config: ModelConfig, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        self.recompute: Recompute = "none"
        self.model = Backbone(config)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )

    @property
    def head_weight(self) -> Tensor:
        """[vocab, hidden] weights of the LM head, the embedding's where tied."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def set_context(self, rope_theta: float, max_position_embeddings: int) -> None:
        """Change RoPE base and longest context, as at a border between training phases."""
        self.config = self.config.model_copy(
            update={"rope_theta": rope_theta, "max_position_embeddings": max_position_embeddings}
        )

    def new_state(self, batch: int, capacity: int = 64) -> SequenceState:
        """An empty state for `batch` sequences, with room for `capacity` tokens at first."""
        device = self.model.norm.weight.device
        return SequenceState(self.config, batch, capacity, self.compute_dtype, device)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        padding_mask: Tensor | None = None,
        state: SequenceState | None = None,
        with_routing: bool = False,
    ) -> Output:
        """Run the layers.

        Args:
            tokens: [batch, seq] int64.
            positions: [batch, seq] int64 within the document, restarting at 0 wherever a packed
                document begins; None means that every row continues its one document.
            padding_mask: [batch, seq] True (or 1) on real tokens, False on padding, which may be
                anywhere; None means no padding.
            state: what earlier forwards left of these sequences; updated in place. Such a forward
                records no gradients. One that is interrupted leaves the state unusable.
            with_routing: also return every layer's routing.

        Raises:
            ValueError: if there are no tokens, or the state is for another number of sequences.
        """
        if not tokens.numel():
            raise ValueError(f"there are no tokens in a batch of shape {list(tokens.shape)}")
        if state is not None and state.batch != tokens.shape[0]:
            raise ValueError(
                f"the state holds {state.batch} sequences, the batch has {tokens.shape[0]}"
            )
        with torch.set_grad_enabled(torch.is_grad_enabled() and state is None):
            return self._run(tokens, positions, padding_mask, state, with_routing)

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor | None,
        padding_mask: Tensor | None,
        state: SequenceState | None,
        with_routing: bool,
    ) -> Output:
        compaction, lengths = None, None
        if padding_mask is not None and not bool(padding_mask.bool().all()):
            compaction = compact(padding_mask)
            lengths = compaction.mask.sum(1).tolist()
            tokens = compaction.apply(tokens)
            positions = None if positions is None else compaction.apply(positions)
        layout = build_layout(
            self.config,
            (tokens.shape[0], tokens.shape[1]),
            tokens.device,
            self.compute_dtype,
            positions,
            lengths,
            state,
        )
        stream = layout.settle(self.model.embed(tokens))
        real = layout.real
        classes = self.config.num_router_classes
        loads, routings = [], []
        router_state = None
        for i, block in enumerate(self.model.layers):
            layer_state = None if state is None else state.layers[i]
            stream, routing = self._layer(block, stream, router_state, layout, layer_state)
            router_state = routing.state
            chosen = routing.chosen if real is None else routing.chosen[real]
            loads.append(torch.bincount(chosen.flatten(), minlength=classes))
            if with_routing:
                routings.append(routing)
        hidden = self.model.norm(stream, self.compute_dtype)
        if state is not None:
            self._advance(state, tokens.shape[1], lengths, positions)
        if compaction is not None:
            hidden = compaction.restore(hidden)
        return Output(hidden, torch.stack(loads), routings if with_routing else None)

    def _layer(
        self,
        block: nn.Module,
        stream: Tensor,
        router_state: Tensor | None,
        layout: Layout,
        state: LayerState | None,
    ) -> tuple[Tensor, Routing]:
        recompute = self.recompute if torch.is_grad_enabled() else "none"
        if recompute != "full":
            result: tuple[Tensor, Routing] = block(
                stream, router_state, layout, state, recompute=recompute
            )
            return result

        def run(
            stream: Tensor, router_state: Tensor | None, chosen: Tensor | None
        ) -> tuple[Tensor, Routing]:
            result: tuple[Tensor, Routing] = block(stream, router_state, layout, None, chosen)
            return result

        return twice_routed(run, stream, router_state)

    @staticmethod
    def _advance(
        state: SequenceState, seq: int, lengths: list[int] | None, positions: Tensor | None
    ) -> None:
        new = lengths or [seq] * state.batch
        starts = list(state.document_starts)
        if positions is not None:
            for row, count in enumerate(new):
                if count:
                    last_slot = state.lengths[row] + count - 1
                    starts[row] = last_slot - int(positions[row, count - 1])
        state.advance(new, starts)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> fp32 [..., vocab]."""
        hidden, weight = hidden.float(), self.head_weight
        if weight.dtype == torch.float32:
            return hidden @ weight.T
        # A low-precision head is widened a stretch at a time, never as a whole.
        return torch.cat([hidden @ part.float().T for part in weight.split(_HEAD_ROWS)], dim=-1)

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Summed cross-entropy in nats of [batch, seq, hidden] against [batch, seq] targets."""
        return linear_cross_entropy(hidden.flatten(0, 1), self.head_weight, targets.flatten())
