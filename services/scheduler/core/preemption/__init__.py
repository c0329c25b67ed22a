"""Preemption: requests that run make room for others and begin anew later."""
