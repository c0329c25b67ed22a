"""The version of the protocol between scheduler and stages."""

PROTOCOL = 15
"""Version of the messages between scheduler and stages.

The version must be increased when worker.proto or the meaning of a message changes in a way that an
older peer would misunderstand. A scheduler accepts only stages of its own version.
"""

MAX_KV_BLOCKS = 2**24
"""Largest number of K/V blocks of a stage. The scheduler's tables take 4 bytes for each block, and
36 bytes for each block in use."""
