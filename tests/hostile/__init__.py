"""Attacks on the real processes: what strangers send, or do not read, takes nothing down.

`attacks` has what attackers do, `attacker.py` does it from a process of its own, `witness.py` is
sixteen honest streams beside it, and `pods.py` runs the system within the limits of its pods.
`python -m benchmarks.serving.hostile` measures what these tests only hold.
"""
