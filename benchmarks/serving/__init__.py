"""Benchmarks of a whole system under load: throughput, latency, fairness, overload, memory."""
