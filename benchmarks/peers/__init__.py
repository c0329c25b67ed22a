"""Engines that others would use instead, each driven by an adapter in an environment of its own.

An adapter runs in its peer's environment and knows the standard library, `protocol` and the peer.
The rest of the benchmarks reaches it through `peer_process` alone.
"""
