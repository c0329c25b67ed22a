"""Attacks on the real processes. No client without permission can stop a process, neither by its
messages nor by not reading the answers.

`attacks` has what attackers do, `attacker.py` does it from a process of its own, `witness.py` is
sixteen honest streams beside it, and `pods.py` runs the system within the limits of its pods.
`python -m benchmarks.serving.hostile` measures what these tests only hold.
"""
