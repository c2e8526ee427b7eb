"""The maths of MoE++, one idea a file.

A token passes the rooms in this order: `model.py` embeds it and keeps the fp32 residual stream;
each `block.py` layer normalises the stream, runs attention (`cca.py`, or `attention.py` for the
classic one) and the experts (`router.py` chooses, `experts.py` computes), and merges each result
through `residual.py`. `layout.py` says where every token of a batch stands (position, document,
padding, cache); `state.py` is what one sequence carries from one forward to the next.
`config.py` defines the shapes, `accounting.py` counts what they cost.

`lora.py` adds low-rank changes to matrices, kept beside them or merged.

What is fp32 whatever the compute dtype: `precision.py`.
"""
