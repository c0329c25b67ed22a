"""The version of what scheduler and stages say to each other."""

PROTOCOL = 3
"""Number of the protocol between scheduler and stages. It grows whenever worker.proto, or its
meaning, changes so that an old side would misunderstand a new one. A scheduler takes only stages
that speak its own."""
