"""The command `orcinus`: from the name of a checkpoint to an answer, and what helps on the way.

It starts services as programs and talks to them as clients do. Only `inspection.py`, which runs in
a process of its own, reads a checkpoint as they would.
"""
