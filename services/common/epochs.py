"""The numbers that epochs may have.

Each term of a leader has a range of epochs (`services/scheduler/cluster/term.py`), and a Kubernetes
Lease counts terms in 31 bits. Leaders never reach the upper half of the numbers up to `MAX_EPOCH`.
If a stage has seen an epoch of the upper half, the number came from a bug or from an attacker. A
leader must not answer with an even larger epoch, because no terms would be left for later leaders.
Instead, the stage ends. When it is started again, it has forgotten the epoch.
"""

EPOCHS_PER_TERM = 2**20
"""Number of epochs in the range of one term. A leader uses fewer epochs in its life: even with a
new epoch every second, the range would last for twelve days."""

MAX_EPOCH = 2**51 - 1
"""The largest number of an epoch; messages with larger epochs are refused."""

MAX_REACHED_EPOCH = 2**50 - 1
"""The largest epoch that a leader can reach. A stage refuses larger epochs from a leader, and a
leader does not continue from a larger epoch of a stage."""
