"""The numbers that epochs may have.

Each term of a leader has a range of epochs (`services/scheduler/cluster/term.py`), and a Kubernetes
Lease counts terms in 31 bits. Leaders never reach the upper half of these numbers, so if a stage
has seen an epoch of the upper half, the number came from a bug or from an attacker. A leader does
not take a larger epoch than such a number, since no terms would be left for later leaders. Instead
the stage ends, and has seen no epoch when it is started again.
"""

EPOCHS_PER_TERM = 2**20
"""Number of epochs in the range of one term. A leader forms fewer in its life: the number allows
one epoch per second for twelve days."""

MAX_EPOCH = 2**51 - 1
"""The largest number of an epoch; messages with larger epochs are refused."""

MAX_REACHED_EPOCH = 2**50 - 1
"""The largest epoch that a stage accepts from a leader, and a leader from a stage, as already
reached."""
