"""The verbs of the command line.

`main.py` lists them; each other module is one verb with `HELP`, `add_arguments` and `run`, which
parses nothing more, calls one function of another room, and prints.
"""
