"""Preemption: running requests make room for others, and are computed again later."""
