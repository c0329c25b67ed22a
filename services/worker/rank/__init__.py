"""A rank: the process that holds one device's shard of a stage.

It joins and leaves epochs, takes plans from its controller in order, exchanges activations with
other ranks, and reports. What is computed in an iteration is the engine's. It never speaks gRPC and
never decides what runs.
"""
