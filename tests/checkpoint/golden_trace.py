"""The bundled golden checkpoint and its trace.

`make golden` rewrites them; `test_trace.py` makes them again and compares. Parameters come from
sums of random integers, so that they are the same bits on every machine.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch

from openzaya.checkpoint.save import save_model
from openzaya.checkpoint.trace_file import GOLDEN, GOLDEN_TRACE, make_trace, write_trace
from openzaya.model.config import ModelConfig
from openzaya.model.model import Zaya
from openzaya.model.precision import keeps_fp32

CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    layer_types=("hybrid_sliding", "hybrid", "hybrid_sliding"),
    sliding_window=5,
    rope_theta=100.0,
    sliding_rope_theta=30.0,
    max_position_embeddings=64,
    num_experts=4,
    moe_intermediate_size=16,
    router_hidden_size=12,
    eos_token_id=1,
)

ROUTER_GAIN = 3.0
"""Different tokens prefer different experts, by margins that rounding in fp32 leaves alone."""

SEED = 119
"""One with which all that `test_trace.py` asks of the bundle holds."""


def golden_model(seed: int = SEED) -> Zaya:
    """A small model with every parameter away from its default.

    Matrices are exact in bfloat16, so that a port in bfloat16 differs in computation only.
    """
    rng = random.Random(seed)

    def noise(shape: torch.Size) -> torch.Tensor:
        """Nearly normal: the sum of twelve uniform numbers has variance one."""
        sums = [sum(rng.getrandbits(16) for _ in range(12)) for _ in range(shape.numel())]
        return torch.tensor(sums, dtype=torch.float64).view(shape) / 2**16 - 6

    model = Zaya(CONFIG)
    for name, tensor in model.state_dict().items():
        value = noise(tensor.shape)
        if name.endswith("balancing_biases"):
            value = 0.1 * value
        elif name.endswith(("scale", "temp")) or "norm" in name:
            value = 1 + 0.25 * value
        elif name.endswith("bias"):
            value = (0.1 if "gate" in name else 0.25) * value
        elif "embed" not in name:
            # Fan-in scaling keeps activations of order one.
            if name.endswith(("fc2.weight", "router_mlp.out_proj.weight")):
                # What follows a GELU sees a positive mean, which must not prefer any expert.
                value = value - value.mean(1, keepdim=True)
            fan_in = tensor[0].numel() if tensor.ndim < 3 or "conv" in name else tensor.shape[2]
            value = (ROUTER_GAIN if "router_mlp" in name else 1.0) * value / fan_in**0.5
        value = value.float()
        tensor.copy_(value if keeps_fp32(name) else value.bfloat16())
    return model.eval()


def write_golden(folder: Path = GOLDEN) -> None:
    model = golden_model()
    folder.mkdir(parents=True, exist_ok=True)
    save_model(model, folder)
    write_trace(folder / GOLDEN_TRACE.name, make_trace(model))


if __name__ == "__main__":
    write_golden()
    for file in sorted(GOLDEN.iterdir()):
        print(f"wrote {file} ({file.stat().st_size:,} bytes)")
