"""The version of the protocol between scheduler and stages."""

PROTOCOL = 12
"""Version of the messages between scheduler and stages.

It grows whenever worker.proto, or the meaning of a message, changes so that an older side would
misunderstand a newer one. A scheduler accepts only stages of its own version.
"""

MAX_KV_BLOCKS = 2**24
"""Maximum number of K/V blocks of a stage; the scheduler's tables take 4 bytes for each block, and
36 bytes for each block in use."""
