"""Classic multi-head and grouped-query attention with RoPE: the baseline that CCA is measured by.

MHA is `num_key_value_heads == num_attention_heads`, GQA anything fewer (arXiv 2305.13245).
"""

from __future__ import annotations

from torch import Tensor, nn

from openzaya.kernels.attention import attend, attend_documents
from openzaya.model.config import LayerType, ModelConfig
from openzaya.model.layers import Linear
from openzaya.model.layout import Layout
from openzaya.model.rope import rotate
from openzaya.model.state import LayerState


class StandardAttention(nn.Module):
    """Projections, RoPE, causal attention, output projection."""

    def __init__(self, config: ModelConfig, layer_type: LayerType) -> None:
        super().__init__()
        self.layer_type = layer_type
        self.head_dim = config.head_dim
        self.q_proj = Linear(config.hidden_size, config.query_width)
        self.k_proj = Linear(config.hidden_size, config.key_width)
        self.v_proj = Linear(config.hidden_size, config.key_width)
        self.o_proj = Linear(config.query_width, config.hidden_size)

    def forward(self, x: Tensor, layout: Layout, state: LayerState | None) -> Tensor:
        """[batch, seq, hidden] -> [batch, seq, hidden]; updates `state`."""
        q, k, v = (
            projection(x).view(*x.shape[:2], -1, self.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        angles = layout.angles[self.layer_type]
        q, k = rotate(q.float(), angles).to(x.dtype), rotate(k.float(), angles).to(x.dtype)
        if state is None:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            out = attend_documents(q, k, v, layout.starts, layout.windows[self.layer_type])
        else:
            k, v = state.extend(k, v, layout.access[self.layer_type])
            out = attend(q, k, v, layout.masks[self.layer_type], layout.causal[self.layer_type])
        return self.o_proj(out.flatten(2))
