"""How well a model answers: `arithmetic.py` poses held-out problems and counts right answers.

It compares them with guessing and says how sure the number is; `grading.py` decides whether one
reply is right, by the last box after the reasoning and by nothing else.
"""
