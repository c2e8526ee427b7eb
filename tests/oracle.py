"""The oracle: `transformers`' ZayaForCausalLM, every parameter randomised, and ours beside it."""

from __future__ import annotations

import random

import torch
from transformers import ZayaConfig, ZayaForCausalLM

from openzaya.checkpoint.dialects import config_from_json
from openzaya.model.config import ModelConfig
from openzaya.model.model import Zaya


def random_geometry(seed: int) -> ZayaConfig:
    """A small random architecture, all legal shapes alike."""
    rng = random.Random(seed)
    layers = rng.randint(1, 6)
    kv_heads = rng.randint(1, 4)
    types = [rng.choice(["hybrid", "hybrid_sliding"]) for _ in range(layers)]
    return ZayaConfig(
        vocab_size=rng.randint(50, 150),
        hidden_size=rng.choice([32, 48, 56, 64]),
        num_hidden_layers=layers,
        num_key_value_heads=kv_heads,
        num_attention_heads=kv_heads * rng.randint(1, 4),
        head_dim=rng.choice([16, 32, 48, 64]),
        cca_time0=rng.randint(2, 4),
        cca_time1=rng.randint(2, 4),
        layer_types=types,
        sliding_window=rng.randint(3, 9),
        num_experts=rng.randint(2, 24),
        moe_intermediate_size=rng.choice([24, 32, 40]),
        router_hidden_size=rng.choice([16, 24, 32]),
        tie_word_embeddings=rng.random() < 0.7,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=1,
        rope_parameters={
            "hybrid": {
                "rope_type": "default",
                "rope_theta": rng.choice([100.0, 1e4, 5e6]),
                "partial_rotary_factor": 0.5,
            },
            "hybrid_sliding": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        },
        attn_implementation="eager",
    )


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Fill every parameter and buffer with values none of which is its default."""
    generator = torch.Generator().manual_seed(seed)

    def noise(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator)

    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("inv_freq"):
                continue
            if name.endswith("balancing_biases"):
                tensor.copy_(0.05 * noise(tensor))  # the skip class fires like the others
            elif name.endswith(("scale", "temp")) or "norm" in name:
                tensor.copy_(1 + 0.2 * noise(tensor))
            elif name.endswith("bias"):
                tensor.copy_(0.2 * noise(tensor))
            elif "embed" in name:
                tensor.copy_(noise(tensor))
            else:
                # fan-in scaling keeps activations of order one at every width
                fan_in = tensor[0].numel() if tensor.ndim < 3 or "conv" in name else tensor.shape[2]
                gain = 1.5 if "router_mlp" in name else 1.0
                tensor.copy_(gain * noise(tensor) / fan_in**0.5)


def pair(config: ZayaConfig, seed: int) -> tuple[ZayaForCausalLM, Zaya]:
    """The oracle and our model with the same random weights, in fp32."""
    oracle = ZayaForCausalLM(config).eval()
    randomise(oracle, seed)
    ours = Zaya(our_config(config))
    ours.load_state_dict(
        {
            name: tensor.clone()
            for name, tensor in oracle.state_dict().items()
            if not (name == "lm_head.weight" and config.tie_word_embeddings)
        }
    )
    return oracle, ours.eval()


def our_config(config: ZayaConfig) -> ModelConfig:
    return config_from_json(config.to_dict(), "the oracle")


def random_tokens(config: ZayaConfig, batch: int, seq: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, config.vocab_size, (batch, seq), generator=generator)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected magnitude."""
    scale = expected.detach().abs().max().clamp_min(1e-12)
    return float((actual - expected).detach().abs().max() / scale)
