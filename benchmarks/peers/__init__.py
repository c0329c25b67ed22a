"""Other engines ("peers") that Orcinus is compared with, each driven by an adapter in an
environment of its own.

An adapter runs in the environment of its peer and imports only the standard library, `protocol` and
the peer. The rest of the benchmarks uses adapters only through `peer_process`.
"""
