"""A rank: the process that holds one device's shard of a stage.

It joins and leaves epochs, takes plans from its controller in order, exchanges activations with
other ranks, and reports. What is computed in an iteration is the engine's. It never speaks gRPC and
never decides what runs.

    rank          the loop: take in messages, run, report
    membership    the epoch that the rank is in: the way in, the member, the way out
    data_plane/   tensors from rank to rank
    stage_shard   weights, which outlive epochs, and what settings and device make of them
    lifeline      the thread that sends heartbeats, hears what cannot wait, and finds a hang
    activity      what the main thread does, and how long it may
"""
