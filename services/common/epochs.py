"""The numbers that epochs may have.

Each term of a leader has 2^20 epochs (`services/scheduler/cluster/term.py`), and a Kubernetes Lease
counts terms in 31 bits. Leaders never come near that by themselves, so a stage that has seen an
epoch of the upper half has it from a mistake or from a stranger. No leader goes beyond such an
epoch: there would be no terms left for those after it. The stage ends instead, and has seen none
when it is started again.
"""

MAX_EPOCH = 2**51 - 1
"""The largest that any epoch can be; larger ones are refused on the wire."""

MAX_REACHED_EPOCH = 2**50 - 1
"""The largest that a stage believes a leader to have reached, and a leader a stage to have seen."""
