"""The version of what scheduler and stages say to each other."""

PROTOCOL = 10
"""Grows whenever worker.proto, or what it means, changes so that an old side would misunderstand a
new one. A scheduler takes only stages that speak its own."""

MAX_KV_BLOCKS = 2**24
"""K/V blocks of a stage at most; the accounts of them take 4 bytes each, and 36 in use."""
