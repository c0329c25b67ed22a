"""Benchmarks of everything but the model: decisions, plans, processes and messages."""
