"""Checks receipts: their signatures, and their tokens, which are computed again.

    read → check signatures → request the same answers from a system → compare

The answers come, through the public gRPC API, from a system that makes receipts too. It runs the
same scheduler and rank programs as the system that made the checked receipts, and may have many
requests in a batch. Its own receipts say which weights and which arithmetic it has.
"""
