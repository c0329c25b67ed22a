"""Benchmarks of one pipeline stage: speed, accuracy of the numbers, and cost of loading weights."""
