"""The numbers that epochs may have.

Each term of a leader has a range of epochs (`services/scheduler/cluster/term.py`), and a Kubernetes
Lease counts terms in 31 bits. Leaders never come near that by themselves, so a stage that has seen
an epoch of the upper half has that number from a mistake or from a stranger. No leader goes beyond
such an epoch, since no terms would be left for later leaders. The stage ends instead, and has seen
no epoch when it is started again.
"""

EPOCHS_PER_TERM = 2**20
"""Epochs in the range of one term, more than a leader forms in its life: one a second for twelve
days."""

MAX_EPOCH = 2**51 - 1
"""The largest number of an epoch; messages with larger ones are refused."""

MAX_REACHED_EPOCH = 2**50 - 1
"""The largest epoch that a stage and a leader believe each other to have reached."""
