"""Ablations that test the architecture's claim: what does each part of MoE++ win at equal size?

`variants.py` makes five models of equal total and active parameters; `plan.py` turns them into
ordinary recipes; `run.py` trains those one after another and can be stopped anywhere; `result.py`
keeps what came of a run; `fit.py` fits curves; `summary.py` takes means over seeds; `report.py`
prints the tables and `plots.py` draws.

It is a room beside `demo`, of which it uses `plan.scaled`: it calls the trainer for whole runs,
which `evals` must not import and `train` has no need to know about.
"""
