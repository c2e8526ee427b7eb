import torch

from openzaya.config.recipe import OptimizerConfig
from openzaya.model.config import PRESETS
from openzaya.model.init import init_weights
from openzaya.model.model import Zaya
from openzaya.optim.groups import build_optimizers, parameter_groups


def test_every_parameter_of_zaya_is_where_decision_11_puts_it():
    model = Zaya(PRESETS["tiny"])
    groups = parameter_groups(model)
    layer = "model.layers.1."
    hidden = {n.removeprefix(layer) for n in groups.hidden if n.startswith(layer)}
    assert hidden == {
        "self_attn.qkv_proj.q_proj.weight",
        "self_attn.qkv_proj.k_proj.weight",
        "self_attn.qkv_proj.v_proj_current.weight",
        "self_attn.qkv_proj.v_proj_delayed.weight",
        "self_attn.o_proj.weight",
        "mlp.gate.down_proj.weight",
        "mlp.gate.router_mlp.fc1.weight",
        "mlp.gate.router_mlp.fc2.weight",
        "mlp.experts.down_proj",
    }
    assert [n for n in groups.gate_up if n.startswith(layer)] == [
        layer + "mlp.experts.gate_up_proj"
    ]
    rest = set(groups.rest)
    assert "model.embed_tokens.weight" in rest
    for name in (
        "mlp.gate.router_mlp.out_proj.weight",
        "mlp.gate.router_states_scale",
        "self_attn.qkv_proj.conv_qk_grouped.weight",
        "self_attn.qkv_proj.conv_qk_depthwise.weight",
        "self_attn.qk_norm.temp",
        "input_layernorm.weight",
        "post_mlp_residual_scale.residual_scale",
    ):
        assert layer + name in rest
    everything = [*groups.hidden, *groups.gate_up, *groups.rest]
    assert sorted(everything) == sorted(n for n, _ in model.named_parameters())


def test_alternatives_are_sorted_by_the_same_rule():
    config = PRESETS["tiny"].model_copy(
        update={"attention": "standard", "router": "linear", "tie_word_embeddings": False}
    )
    groups = parameter_groups(Zaya(config))
    assert "model.layers.0.self_attn.v_proj.weight" in groups.hidden
    assert "model.layers.0.mlp.gate.out_proj.weight" in groups.rest
    assert "lm_head.weight" in groups.rest


def test_both_hidden_optimizers_move_every_parameter():
    for hidden in ("muon", "adamw"):
        model = Zaya(PRESETS["tiny"])
        init_weights(model, 0)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizers = build_optimizers(model, OptimizerConfig(hidden=hidden))
        tokens = torch.randint(0, 512, (4, 32), generator=torch.Generator().manual_seed(0))
        out = model(tokens)
        model.loss(out.hidden, tokens.roll(-1, 1)).backward()
        for optimizer in optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = 1e-3
            optimizer.step()
        still = [n for n, p in model.named_parameters() if torch.equal(p, before[n])]
        assert still == []
