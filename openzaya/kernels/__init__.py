"""Single operations with one plain reference each, and faster forms beside it.

- `norm.py`: RMSNorm and L2 normalisation, statistics in fp32.
- `attention.py`: causal attention with grouped key-value heads.
- `experts.py`: SwiGLU experts over tokens sorted by expert.
- `cross_entropy.py`: LM head and cross-entropy without holding all logits.
"""
