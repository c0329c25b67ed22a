"""Checks receipts: their signatures, and their tokens, which are computed again.

    read → check signatures → ask a system for the same answers → compare

The answers come from a system of its own that makes receipts too, through the public gRPC API: the
same scheduler and the same ranks as when the receipts were made, with many requests in a batch. The
system's own receipts say which weights and which arithmetic it has.
"""
