"""Checkpoints that are damaged in many ways, and the results of reading them.

`originals.py` has whole checkpoints in each format and of each family, `damage.py` lists the ways
in which one thing of them breaks, and `outcome.py` and `oracle.py` read what is left, with the code
of workers and frontends and with `transformers`.
"""
