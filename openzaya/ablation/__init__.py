"""Ablations that test the architecture's claim: what does each part of MoE++ win at equal size?

`variants.py` makes five models of equal total and active parameters; `plan.py` turns them into
ordinary recipes; `run.py` trains those one after another and can be stopped anywhere; `summary.py`
takes means over seeds; `fit.py` fits curves; `report.py` prints the table and `plots.py` draws.

It is a room beside `demo`: it calls the trainer for whole runs, which `evals` must not import and
`train` has no need to know about.
"""
