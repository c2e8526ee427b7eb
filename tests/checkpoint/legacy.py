"""The legacy layout by hand: what each half-layer calls a tensor, written from its description.

Nothing here uses the project's own table, so that a mistake in the table is no mistake here.
"""

from __future__ import annotations

import re

from torch import Tensor

_ATTENTION = {
    "input_layernorm.weight": "input_norm.weight",
    "self_attn.qkv_proj.q_proj.weight": "self_attn.qkv.linear_q.weight",
    "self_attn.qkv_proj.k_proj.weight": "self_attn.qkv.linear_k.weight",
    "self_attn.qkv_proj.v_proj_current.weight": "self_attn.qkv.val_proj1.weight",
    "self_attn.qkv_proj.v_proj_delayed.weight": "self_attn.qkv.val_proj2.weight",
    "self_attn.qkv_proj.conv_qk_depthwise.weight": "self_attn.qkv.conv_qk.0.weight",
    "self_attn.qkv_proj.conv_qk_depthwise.bias": "self_attn.qkv.conv_qk.0.bias",
    "self_attn.qkv_proj.conv_qk_grouped.weight": "self_attn.qkv.conv_qk.1.weight",
    "self_attn.qkv_proj.conv_qk_grouped.bias": "self_attn.qkv.conv_qk.1.bias",
    "self_attn.qk_norm.temp": "self_attn.qkv.temp",
    "self_attn.o_proj.weight": "self_attn.o_proj.weight",
}
_EXPERTS = {
    "post_attention_layernorm.weight": "input_norm.weight",
    "mlp.gate.down_proj.weight": "zaya_block.router.down_proj.weight",
    "mlp.gate.down_proj.bias": "zaya_block.router.down_proj.bias",
    "mlp.gate.router_states_scale": "zaya_block.router.router_states_scale",
    "mlp.gate.router_mlp.norm.weight": "zaya_block.router.rmsnorm_eda.weight",
    "mlp.gate.router_mlp.fc1.weight": "zaya_block.router.router_mlp.0.weight",
    "mlp.gate.router_mlp.fc1.bias": "zaya_block.router.router_mlp.0.bias",
    "mlp.gate.router_mlp.fc2.weight": "zaya_block.router.router_mlp.2.weight",
    "mlp.gate.router_mlp.fc2.bias": "zaya_block.router.router_mlp.2.bias",
    "mlp.gate.router_mlp.out_proj.weight": "zaya_block.router.router_mlp.4.weight",
    "mlp.gate.balancing_biases": "zaya_block.router.balancing_biases",
}


def to_legacy(native: dict[str, Tensor], blocks: int) -> dict[str, Tensor]:
    """Tensors of a native checkpoint under their legacy names, experts taken apart."""
    legacy: dict[str, Tensor] = {}
    for name, tensor in native.items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if match is None:
            new = {
                "model.norm.weight": "model.final_norm.weight",
                "model.input_hidden_states_scale": "model.layers.0.res_scale.hidden_states_scale",
                "model.input_hidden_states_bias": "model.layers.0.res_scale.hidden_states_bias",
            }.get(name, name)
            legacy[new] = tensor
            continue
        block, rest = int(match[1]), match[2]
        attention, experts = f"model.layers.{2 * block}", f"model.layers.{2 * block + 1}"
        if rest in _ATTENTION:
            legacy[f"{attention}.{_ATTENTION[rest]}"] = tensor
        elif rest in _EXPERTS:
            legacy[f"{experts}.{_EXPERTS[rest]}"] = tensor
        elif rest.startswith("post_attention_residual_scale."):
            legacy[f"{experts}.res_scale.{rest.rpartition('.')[2]}"] = tensor
        elif rest.startswith("post_mlp_residual_scale."):
            last = block == blocks - 1
            home = "model" if last else f"model.layers.{2 * block + 2}"
            legacy[f"{home}.res_scale.{rest.rpartition('.')[2]}"] = tensor
        else:
            part = {"gate_up_proj": "linear_fc1", "down_proj": "linear_fc2"}[rest.split(".")[-1]]
            for number, expert in enumerate(tensor):
                where = f"{experts}.zaya_block.experts.local_experts.{number}"
                legacy[f"{where}.{part}.weight"] = expert.contiguous()
    return legacy
