"""Single operations with one plain reference each, and faster forms beside it.

- `norm.py`: RMSNorm and L2 normalisation, and the residual merge before a norm.
- `attention.py`: causal attention with grouped key-value heads, by document.
- `cca.py`: convolutions, mean, norm, rotation and value shift of CCA in one pass.
- `experts.py`: SwiGLU experts over tokens sorted by expert.
- `cross_entropy.py`: LM head and cross-entropy without holding all logits.
- `weights.py`: products with weights that are cast as they are used.
- `native/`: the same in C for CPUs, compiled on first use (`docs/kernels.md`).
- `allocator.py`: keeps freed memory in the process.
"""
