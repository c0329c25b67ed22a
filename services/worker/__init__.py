"""One pipeline stage: a controller that speaks gRPC, and ranks that compute.

    __main__    starts the controller, which starts a rank for each device
    controller/ the stage's gRPC service: forwards plans and the reports of ranks   (never torch)
    channel     frames between the controller and a rank, over a socket pair
    rank/       a process with torch and without gRPC: joins epochs, runs plans, transfers tensors
    engine/     one iteration of the model: from the columns of a plan to sampled tokens
    models/     the model families, their layers and their weights

The controller and its ranks are separate processes, so that the event loop does not compete with
kernel launches for the interpreter lock. A plan thus reaches the next stage without delay, even if
the ranks of this stage are busy.
"""
