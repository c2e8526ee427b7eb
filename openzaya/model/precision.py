"""Which numbers stay fp32, in training and in serving alike.

Operations that run in fp32 whatever the compute dtype (arXiv 2605.05365, section IV-D):

- q-k mean, q-k norm and temperature, RoPE (`cca.py`)
- statistics and gain of every RMSNorm (`kernels/norm.py`)
- the whole router: state and depth averaging, MLP, softmax, balancing biases (`router.py`)
- the residual stream, its scales, biases and sums (`residual.py`), unless `residual_in_fp32` is
  off, for parity with ZAYA1-base: then it is rounded after each sum
- conv tail and lagged value of the sequence state (`state.py`)
- the LM head product and cross-entropy (`model.py`, `kernels/cross_entropy.py`)

Only matrices are ever stored in a lower precision, and never the router's or the convolutions'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the list is also read where torch is too slow to import
    import torch
    from torch import nn

KEEP_FP32 = ("conv_qk_", "qk_norm.", "norm", ".gate.", "residual_scale.", "input_hidden_states_")
"""Parameters whose names hold one of these parts are never cast below fp32."""


def keeps_fp32(name: str) -> bool:
    """Whether the parameter or buffer of that name is never held below fp32."""
    return any(part in name for part in KEEP_FP32)


def cast_for_inference(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast in place to `dtype` the parameters that may be; the rest become fp32."""
    import torch

    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if keeps_fp32(name) else dtype)
