"""From gradients to new weights.

`groups.py` decides which optimizer updates which parameter;
`muon.py` orthogonalises the updates of hidden matrices with the iteration of `newton_schulz.py`;
the rest goes to AdamW: torch's, or that of `adamw.py` for moments in bf16.
`schedule.py` gives the learning rate of a step; `balance.py` moves the routers' balancing biases.
"""
