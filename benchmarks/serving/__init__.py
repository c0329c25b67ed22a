"""A whole system under the load of clients: throughput, latency, fairness, overload, memory."""
