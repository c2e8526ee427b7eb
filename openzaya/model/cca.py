"""Compressed convolutional attention (CCA, arXiv 2510.04476, section 3 and listing 1).

Attention runs in a narrow latent: queries and keys are projected down, mixed by two short causal
convolutions, joined with the mean of their unconvolved selves, normalised and turned; half of the
value channels come from the previous token. Keys and values are never projected up, so what is
cached is the latent itself.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from openzaya.kernels.attention import attend, attend_documents
from openzaya.kernels.cca import has_kernel, latent_qkv
from openzaya.kernels.norm import l2_normalize
from openzaya.kernels.weights import linear
from openzaya.model.config import LayerType, ModelConfig
from openzaya.model.layers import Linear
from openzaya.model.layout import Layout
from openzaya.model.rope import rotate
from openzaya.model.state import LayerState


class CausalConv(nn.Module):
    """Weights of one causal convolution over time.

    Args:
        channels: input and output channels.
        groups: channels are mixed inside each of this many groups.
        taps: tokens that one output looks at, itself included; the last tap is the token itself.
    """

    def __init__(self, channels: int, groups: int, taps: int) -> None:
        super().__init__()
        self.taps = taps
        self.groups = groups
        self.weight = nn.Parameter(torch.empty(channels, channels // groups, taps))
        self.bias = nn.Parameter(torch.zeros(channels))

    def tap(self, distance: int) -> Tensor:
        """Weights [channels, channels / groups] for the token `distance` back."""
        return self.weight[..., self.taps - 1 - distance]


class CCAProjection(nn.Module):
    """From normed hidden states to the latent queries, keys and values."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.history = config.conv_history
        width, channels = config.hidden_size, config.conv_channels
        self.q_proj = Linear(width, config.query_width)
        self.k_proj = Linear(width, config.key_width)
        self.v_proj_current = Linear(width, config.key_width // 2)
        self.v_proj_delayed = Linear(width, config.key_width // 2)
        self.conv_qk_depthwise = CausalConv(channels, channels, config.cca_time0)
        self.conv_qk_grouped = CausalConv(channels, self.heads + self.kv_heads, config.cca_time1)

    def forward(
        self, x: Tensor, layout: Layout, state: LayerState | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Steps 1 to 6 of the listing.

        Args:
            x: [batch, seq, hidden] normed input.

        Returns:
            q [batch, seq, heads, head_dim] and k [batch, seq, kv_heads, head_dim] in fp32, before
            the norm; v [batch, seq, kv_heads, head_dim] in x's dtype.
        """
        q0, k0 = self.q_proj(x), self.k_proj(x)
        q, k = self.convolve(torch.cat([q0, k0], dim=-1), layout, state)
        mean_q, mean_k = self._mean(q0, k0)
        return q + mean_q, k + mean_k, self._shift_values(x, layout, state)

    def convolve(
        self, latent: Tensor, layout: Layout, state: LayerState | None
    ) -> tuple[Tensor, Tensor]:
        """Depthwise, then per-head convolution of [batch, seq, conv_channels].

        Both look back within the document only; before its first token the latent is zero. There
        the depthwise output is its bias, not zero (padding comes once, before both convolutions).
        As everything is linear, that bias passes through all taps of the second convolution
        everywhere, and can be added at its end as a constant.
        """
        batch, seq, channels = latent.shape
        if state is None:
            past = latent.new_zeros(batch, self.history, channels)
        else:
            assert state.conv_tail is not None
            past = state.conv_tail.to(latent.dtype)
        latent = torch.cat([past, latent], dim=1)
        if state is not None:
            state.conv_tail = layout.last(latent, self.history).float()

        # The second convolution also needs the depthwise outputs of the tokens just before.
        depthwise, grouped = self.conv_qk_depthwise, self.conv_qk_grouped
        lead = grouped.taps - 1
        before = layout.positions[:, :1] + torch.arange(-lead, 0, device=latent.device)
        positions = torch.cat([before, layout.positions], dim=1)
        mixed = torch.zeros((), dtype=latent.dtype, device=latent.device)
        for i in range(depthwise.taps):
            weight = depthwise.tap(i)[:, 0].to(latent.dtype)
            mixed = mixed + layout.earlier(latent, i, positions) * weight
        taps = [layout.earlier(mixed, j) for j in range(grouped.taps)]
        heads = self.heads + self.kv_heads
        weight = torch.stack([grouped.tap(j) for j in range(grouped.taps)])
        weight = weight.view(grouped.taps, heads, self.head_dim, self.head_dim)
        # [heads, batch * seq, taps * head_dim] x [heads, taps * head_dim, head_dim]
        stacked = torch.stack(taps, dim=2).view(batch * seq, grouped.taps, heads, self.head_dim)
        stacked = stacked.permute(2, 0, 1, 3).reshape(heads, batch * seq, -1)
        kernel = weight.permute(1, 0, 3, 2).reshape(heads, -1, self.head_dim)
        out = torch.bmm(stacked, kernel.to(stacked.dtype)).float()
        bias = torch.einsum(
            "jhoc,hc->ho", weight, depthwise.bias.to(weight.dtype).view(heads, self.head_dim)
        )
        out = out + (bias + grouped.bias.view(heads, self.head_dim)).float()[:, None]
        out = out.view(heads, batch, seq, self.head_dim).permute(1, 2, 0, 3)
        return out[:, :, : self.heads], out[:, :, self.heads :]

    def packed(self, x: Tensor) -> Tensor:
        """Query, key and value latents of [batch, seq, hidden] side by side, in one product."""
        layers = self.q_proj, self.k_proj, self.v_proj_current, self.v_proj_delayed
        return linear(x, *(layer.weight for layer in layers))

    def _mean(self, q0: Tensor, k0: Tensor) -> tuple[Tensor, Tensor]:
        """Mean of query and key latents: (q + k)/2 per query head, its group mean per key head."""
        group = self.heads // self.kv_heads
        q0 = q0.float().view(*q0.shape[:2], self.kv_heads, group, self.head_dim)
        k0 = k0.float().view(*k0.shape[:2], self.kv_heads, 1, self.head_dim)
        mean = (q0 + k0) * 0.5
        return mean.flatten(2, 3), mean.mean(3)

    def _shift_values(self, x: Tensor, layout: Layout, state: LayerState | None) -> Tensor:
        """First half of the value channels from this token, second half from the one before."""
        current, lagged = self.v_proj_current(x), self.v_proj_delayed(x)
        if state is None:
            past = torch.zeros_like(lagged[:, :1])
        else:
            assert state.lagged_value is not None
            past = state.lagged_value[:, None].to(lagged.dtype)
        lagged = torch.cat([past, lagged], dim=1)
        if state is not None:
            state.lagged_value = layout.last(lagged, 1)[:, 0].float()
        v = torch.cat([current, layout.earlier(lagged, 1)], dim=-1)
        return v.view(*x.shape[:2], self.kv_heads, self.head_dim)


class QKNorm(nn.Module):
    """Queries and keys to length sqrt(head_dim); keys also times a learned temperature.

    The temperature multiplies linearly (arXiv 2605.05365, appendix C). It starts at 1: at 0 keys
    and their gradients would vanish.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.temp = nn.Parameter(torch.ones(config.num_key_value_heads))

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, seq, heads, head_dim] each, in and out in fp32."""
        return l2_normalize(q), l2_normalize(k) * self.temp.float()[:, None]


class CCAttention(nn.Module):
    """One CCA sub-layer: latent projections, norm, RoPE, causal attention, output projection."""

    def __init__(self, config: ModelConfig, layer_type: LayerType) -> None:
        super().__init__()
        self.layer_type = layer_type
        self.qkv_proj = CCAProjection(config)
        self.qk_norm = QKNorm(config)
        self.o_proj = Linear(config.query_width, config.hidden_size)

    def forward(self, x: Tensor, layout: Layout, state: LayerState | None) -> Tensor:
        """[batch, seq, hidden] -> [batch, seq, hidden]; updates `state`."""
        if state is None:
            q, k, v = self._whole(x, layout)
            out = attend_documents(q, k, v, layout.starts, layout.windows[self.layer_type])
            return self.o_proj(out.flatten(2))
        q, k, v = self._operands(x, layout, state)
        k, v = state.extend(k, v, layout.access[self.layer_type])
        out = attend(q, k, v, layout.masks[self.layer_type], layout.causal[self.layer_type])
        return self.o_proj(out.flatten(2))

    def _operands(
        self, x: Tensor, layout: Layout, state: LayerState | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [batch, seq, heads or kv_heads, head_dim] in x's dtype."""
        q, k, v = self.qkv_proj(x, layout, state)
        q, k = self.qk_norm(q, k)
        angles = layout.angles[self.layer_type]
        return rotate(q, angles).to(x.dtype), rotate(k, angles).to(x.dtype), v

    def _whole(self, x: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """The same of whole rows, heads before tokens; in one pass where there is a kernel."""
        project = self.qkv_proj
        taps = project.conv_qk_depthwise.taps, project.conv_qk_grouped.taps
        if not has_kernel(x, project.head_dim, taps):
            q, k, v = self._operands(x, layout, None)
            return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return latent_qkv(
            project.packed(x),
            (project.heads, project.kv_heads),
            layout.places,
            (project.conv_qk_depthwise.weight, project.conv_qk_depthwise.bias),
            (project.conv_qk_grouped.weight, project.conv_qk_grouped.bias),
            self.qk_norm.temp,
            layout.angles[self.layer_type],
        )
