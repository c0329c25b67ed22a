"""A rank: the process that holds one device's shard of a stage.

A rank joins and leaves epochs, takes plans from its controller in order, exchanges activations with
other ranks, and reports results. `services.worker.engine` computes an iteration. A rank never uses
gRPC and never decides which iterations run.

    rank          the loop: receive messages, run, report
    membership    joins and leaves epochs, one epoch at a time
    data_plane/   transfers of tensors between ranks
    stage_shard   the weights, which are kept from one epoch to the next, and their device
    lifeline      the thread that sends heartbeats, ends epochs, takes grammars, and detects a hang
    activity      the current step of the main thread, and its time limit
"""
