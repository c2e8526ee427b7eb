"""Training: from a recipe to a run folder.

`trainer.py` is the loop; `state.py` is everything that must survive a restart; `evaluate.py`
measures held-out loss; `metrics.py` writes the log; `live.py` shows it; `stop.py` turns signals
into a clean end; `setup.py` checks a recipe and opens everything it names before step 1.
"""
