"""One pipeline stage: a controller that speaks gRPC, and ranks that compute.

    __main__    starts the controller, which starts a rank for each device
    controller/ the stage's gRPC face: forwards plans, passes on what ranks report   (never torch)
    channel     frames between the controller and a rank, over a socket pair
    rank/       a process with torch and without gRPC: joins epochs, runs plans, moves tensors
    engine/     one iteration of the model: from a plan's columns to sampled tokens
    models/     the families, their layers and their weights

The controller and its ranks are separate processes so that an event loop never competes with
kernel launches for the interpreter lock, and a plan reaches the next stage however busy the ranks
of this one are.
"""
