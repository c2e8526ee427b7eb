"""Where every token of a batch stands: position, document, padding, and what it may see.

Built once per forward and shared by all layers. Inside the model rows are padded on the right
only (`compact` and `Compaction.restore` take care of any other padding), so a row's tokens are
contiguous and follow directly on what its state holds. A document border is a position that
restarts at zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from openzaya.model.config import LayerType, ModelConfig
from openzaya.model.rope import rotary_angles
from openzaya.model.state import Access, SequenceState


@dataclass
class Layout:
    """Everything that layers need to know about the arrangement of a batch.

    Attributes:
        positions: [batch, seq] position of each token within its document.
        lengths: real tokens of each row, or None when no row is padded.
        packed: rows may hold several documents, or `positions` were given.
        starts: [batch, seq] int32, place in the row at which each token's document begins; None
            where every row is one document.
        places: [batch, seq] int32, the positions; None as `starts`.
        windows: per layer type, tokens that a token sees, itself included; None is all.
        angles: per layer type, RoPE cosine and sine.
        masks: with a state, per layer type, [batch, seq, keys] boolean or None (see `causal`).
        causal: with a state, per layer type, whether the plain causal mask applies.
        access: with a state, per layer type, how its buffers are used.
        dtype: compute dtype of matrix products.
        residual_in_fp32: whether the residual stream keeps its precision between sub-layers.
    """

    positions: Tensor
    lengths: list[int] | None
    packed: bool
    starts: Tensor | None
    places: Tensor | None
    dtype: torch.dtype
    residual_in_fp32: bool
    windows: dict[LayerType, int | None] = field(default_factory=dict)
    angles: dict[LayerType, tuple[Tensor, Tensor]] = field(default_factory=dict)
    masks: dict[LayerType, Tensor | None] = field(default_factory=dict)
    causal: dict[LayerType, bool] = field(default_factory=dict)
    access: dict[LayerType, Access] = field(default_factory=dict)

    @property
    def real(self) -> Tensor | None:
        """[batch, seq] True on tokens that are not padding; None when there is no padding."""
        if self.lengths is None:
            return None
        device = self.positions.device
        lengths = torch.tensor(self.lengths, device=device)[:, None]
        return torch.arange(self.positions.shape[1], device=device)[None] < lengths

    def settle(self, stream: Tensor) -> Tensor:
        """The fp32 residual stream as it goes on: rounded, where the model was trained so."""
        return stream if self.residual_in_fp32 else stream.to(self.dtype).float()

    def earlier(self, x: Tensor, distance: int, positions: Tensor | None = None) -> Tensor:
        """Each token's predecessor `distance` tokens back in its document, zero if there is none.

        Args:
            x: [batch, history + seq, channels], history being the tokens just before the batch.
            distance: how far back, at most `history`.
            positions: [batch, seq] if other than those of the layout.

        Returns:
            [batch, seq, channels].
        """
        positions = self.positions if positions is None else positions
        seq = positions.shape[1]
        start = x.shape[1] - seq - distance
        shifted = x[:, start : start + seq]
        if self.packed and distance:
            shifted = shifted * (positions >= distance)[..., None].to(x.dtype)
        return shifted

    def last(self, x: Tensor, count: int) -> Tensor:
        """The last `count` real tokens of every row.

        Args:
            x: [batch, history + seq, channels] with history >= count.

        Returns:
            [batch, count, channels].
        """
        history = x.shape[1] - self.positions.shape[1]
        if self.lengths is None:
            return x[:, x.shape[1] - count :]
        end = torch.tensor(self.lengths, device=x.device)[:, None] + history
        index = end - count + torch.arange(count, device=x.device)[None]
        return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))


def build_layout(
    config: ModelConfig,
    shape: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
    positions: Tensor | None = None,
    lengths: list[int] | None = None,
    state: SequenceState | None = None,
) -> Layout:
    """Arrange a batch of right-padded rows.

    Args:
        shape: (batch, seq).
        positions: [batch, seq] int64 within the document, restarting at 0 at every border; None
            continues the current document.
        lengths: real tokens of each row; None if no row is padded.
        state: what the rows carry from earlier forwards; room is made for the new tokens.
    """
    batch, seq = shape
    column = torch.arange(seq, device=device)[None]
    before = starts = [0] * batch
    new_lengths = lengths or [seq] * batch
    if state is not None:
        before, starts = state.lengths, state.document_starts
        state.reserve(max(a + b for a, b in zip(before, new_lengths, strict=True)))
    packed = positions is not None or any(starts)
    slots = torch.tensor(before, device=device)[:, None] + column
    if positions is None:
        positions = slots - torch.tensor(starts, device=device)[:, None]
    positions = positions.expand(batch, seq)  # kernels read a number per token
    begins = slots - positions
    layout = Layout(
        positions,
        lengths,
        packed,
        begins.clamp_min(0).int().contiguous() if packed else None,
        positions.int().contiguous() if packed else None,
        dtype,
        config.residual_in_fp32,
    )
    fresh = not any(before)
    for layer_type in set(config.types):
        layout.angles[layer_type] = rotary_angles(
            positions, config.rotary_dim, config.theta(layer_type)
        )
        window = layout.windows[layer_type] = config.window(layer_type)
        if state is None:
            continue
        layout.access[layer_type] = state.access(layer_type, seq, new_lengths)
        uniform = len(set(before)) == 1 and len(set(new_lengths)) == 1
        narrow = window is not None and max(before) + seq > window
        if fresh and not packed and not narrow:
            layout.masks[layer_type], layout.causal[layer_type] = None, True
            # Right-padded rows: real queries see no padding by causality.
            layout.access[layer_type].write_first = False
            layout.access[layer_type].readable = 0
            continue
        layout.causal[layer_type] = False
        if seq == 1 and uniform and not packed and not narrow and not any(starts):
            layout.masks[layer_type] = None  # everything stored is visible
            continue
        key_slots = layout.access[layer_type].key_slots
        layout.masks[layer_type] = _visible(slots, key_slots, begins, window)
    return layout


def _visible(slots: Tensor, key_slots: Tensor, starts: Tensor, window: int | None) -> Tensor:
    """[batch, seq, keys]: key in the query's document, not after it, inside its window."""
    query, key, start = slots[..., None], key_slots[:, None], starts[..., None]
    mask = (key <= query) & (key >= start) & (key >= 0)
    if window is not None:
        mask &= key > query - window
    return mask


@dataclass
class Compaction:
    """Moves the real tokens of every row to the left, and results back.

    Attributes:
        order: [batch, seq] column of the token that comes to stand in each column.
        mask: [batch, seq] True on real tokens, in the original arrangement.
    """

    order: Tensor
    mask: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """[batch, seq] -> [batch, seq], real tokens first."""
        return x.gather(1, self.order)

    def restore(self, x: Tensor) -> Tensor:
        """[batch, seq, channels] back in the original arrangement, zero on padding."""
        index = self.order.argsort(1)[..., None].expand(-1, -1, x.shape[2])
        return x.gather(1, index).where(self.mask[..., None], 0)


def compact(padding_mask: Tensor) -> Compaction:
    """Plan the move for any padding: left, right, or holes. [batch, seq] True on real tokens."""
    mask = padding_mask.bool()
    return Compaction((~mask).to(torch.int8).argsort(dim=1, stable=True), mask)
