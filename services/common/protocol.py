"""The version of what scheduler and stages say to each other."""

PROTOCOL = 10
"""Grows whenever worker.proto, or what it means, changes so that an old side would misunderstand a
new one. A scheduler takes only stages that speak its own."""
