"""The scheduling core (Orca, section 4.2): requests, their pool, K/V accounting, Algorithm 1.

It is pure: no asyncio, no gRPC, no tensors, no text, no clock. Tests and benchmarks drive it with
plain calls.
"""
