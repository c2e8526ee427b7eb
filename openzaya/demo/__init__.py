"""The main job end to end: train the small preset in front of the user, test it, talk to it.

`plan.py` fits the recipe to the time at hand; `demo.py` runs it.
"""
