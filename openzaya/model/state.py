"""What a sequence carries from one forward to the next: KV, conv tail, lagged value.

A `SequenceState` holds a batch of sequences, each with its own length. Keys and values of token
number `s` (its *slot*, counted over the whole row) lie at index `s` of a full layer and at index
`s mod capacity` of a sliding one, whose capacity never exceeds its window. Padding is not stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openzaya.model.config import LayerType, ModelConfig


@dataclass
class Access:
    """How the layers of one type read and write their buffers in one forward.

    Attributes:
        key_slots: [batch, keys] slot of every key that attention sees, negative where empty.
        write_first: the new tokens fit without overwriting any key that one of them still sees.
        readable: buffer entries that can hold keys.
        rows, source, target: which new token goes where: buffer[rows, target] = new[rows, source].
    """

    key_slots: Tensor
    write_first: bool
    readable: int
    rows: Tensor
    source: Tensor
    target: Tensor


@dataclass
class LayerState:
    """State of one attention layer.

    Attributes:
        k, v: [batch, capacity, kv_heads, head_dim] after convolution, norm and RoPE.
        conv_tail: [batch, conv_history, conv_channels] fp32, the last query-key latents before
            the convolutions; None in classic attention.
        lagged_value: [batch, key_width / 2] fp32, W_V2 x of the last token (the *projection*, not
            the hidden state); None in classic attention.
    """

    layer_type: LayerType
    k: Tensor
    v: Tensor
    conv_tail: Tensor | None
    lagged_value: Tensor | None

    def extend(self, k: Tensor, v: Tensor, access: Access) -> tuple[Tensor, Tensor]:
        """Store new keys and values, and return all that attention may see.

        Args:
            k, v: [batch, new, kv_heads, head_dim].

        Returns:
            Keys and values [batch, keys, kv_heads, head_dim], in the order of access.key_slots.
        """
        if access.write_first:
            self._write(k, v, access)
            return self.k[:, : access.readable], self.v[:, : access.readable]
        seen_k = torch.cat([self.k[:, : access.readable].to(k.dtype), k], dim=1)
        seen_v = torch.cat([self.v[:, : access.readable].to(v.dtype), v], dim=1)
        self._write(k, v, access)
        return seen_k, seen_v

    def _write(self, k: Tensor, v: Tensor, access: Access) -> None:
        where = (access.rows, access.target)
        self.k[where] = k[access.rows, access.source].to(self.k.dtype)
        self.v[where] = v[access.rows, access.source].to(self.v.dtype)


class SequenceState:
    """State of a batch of sequences, in all layers.

    Args:
        config: the model's.
        batch: number of sequences.
        capacity: tokens to make room for; grows by itself when exceeded.
        dtype: of keys and values (conv tail and lagged value are always fp32).
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        capacity: int = 64,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config = config
        self.lengths = [0] * batch
        """Tokens seen by each sequence, padding excluded."""
        self.document_starts = [0] * batch
        """Slot at which the current document of each sequence began."""
        self.capacity = capacity
        cca = config.attention == "cca"
        self.layers: list[LayerState] = []
        for layer_type in config.types:
            slots = self._slots(layer_type, capacity)
            shape = (batch, slots, config.num_key_value_heads, config.head_dim)
            tail = (batch, config.conv_history, config.conv_channels)
            lag = (batch, config.key_width // 2)
            self.layers.append(
                LayerState(
                    layer_type,
                    torch.zeros(shape, dtype=dtype, device=device),
                    torch.zeros(shape, dtype=dtype, device=device),
                    torch.zeros(tail, device=device) if cca else None,
                    torch.zeros(lag, device=device) if cca else None,
                )
            )

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    @property
    def kv_nbytes(self) -> int:
        """Bytes of all key and value buffers."""
        return sum(layer.k.nbytes + layer.v.nbytes for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, conv tails and lagged values included."""
        extra = (t for layer in self.layers for t in (layer.conv_tail, layer.lagged_value))
        return self.kv_nbytes + sum(t.nbytes for t in extra if t is not None)

    def _slots(self, layer_type: LayerType, capacity: int) -> int:
        return min(capacity, self.config.window(layer_type) or capacity)

    def reserve(self, tokens: int) -> None:
        """Make room for rows of `tokens` tokens, at least doubling when anything must grow."""
        if tokens <= self.capacity:
            return
        self.capacity = max(tokens, 2 * self.capacity)
        for layer in self.layers:
            grow = self._slots(layer.layer_type, self.capacity) - layer.k.shape[1]
            # A sliding layer below its window has not wrapped yet, so appending keeps the order.
            pad = (0, 0, 0, 0, 0, grow)
            layer.k = torch.nn.functional.pad(layer.k, pad)
            layer.v = torch.nn.functional.pad(layer.v, pad)

    def access(self, layer_type: LayerType, new: int, new_lengths: list[int]) -> Access:
        """Plan one forward of `new` columns, of which `new_lengths[row]` are real in each row."""
        device = self.layers[0].k.device
        slots = self._slots(layer_type, self.capacity)
        before = torch.tensor(self.lengths, device=device)[:, None]
        real = torch.tensor(new_lengths, device=device)[:, None]
        after = before + real
        column = torch.arange(new, device=device)[None]
        # Of a chunk longer than the buffer only the last tokens survive.
        keep = (column < real) & (before + column >= after - slots)
        rows, source = keep.nonzero(as_tuple=True)
        target = (before + column)[rows, source] % slots
        longest = max(a + b for a, b in zip(self.lengths, new_lengths, strict=True))
        write_first = new == 1 or longest <= slots
        held = after if write_first else before
        readable = min(longest if write_first else max(self.lengths), slots)
        # Entry e holds the youngest slot below `held` that is congruent to e.
        entry = torch.arange(readable, device=device)[None]
        key_slots = held - 1 - (held - 1 - entry) % slots
        if not write_first:
            fresh = torch.where(column < real, before + column, -1)
            key_slots = torch.cat([key_slots, fresh], dim=1)
        return Access(key_slots, write_first, readable, rows, source, target)

    def advance(self, new_lengths: list[int], document_starts: list[int]) -> None:
        """Count the tokens of a finished forward."""
        self.lengths = [a + b for a, b in zip(self.lengths, new_lengths, strict=True)]
        self.document_starts = document_starts

    def select(self, rows: list[int]) -> SequenceState:
        """A new state of the given sequences, in this order (copies; repeats are allowed)."""
        picked = SequenceState.__new__(SequenceState)
        picked.config = self.config
        picked.capacity = self.capacity
        picked.lengths = [self.lengths[row] for row in rows]
        picked.document_starts = [self.document_starts[row] for row in rows]
        index = torch.tensor(rows, dtype=torch.int64, device=self.layers[0].k.device)
        picked.layers = [
            LayerState(
                layer.layer_type,
                layer.k.index_select(0, index),
                layer.v.index_select(0, index),
                None if layer.conv_tail is None else layer.conv_tail.index_select(0, index),
                None if layer.lagged_value is None else layer.lagged_value.index_select(0, index),
            )
            for layer in self.layers
        ]
        return picked
