"""The data plane: activations from rank to rank, in the process groups of one epoch.

    transport        what a rank asks of the data plane, and how a rank knows its place
    rendezvous       the store where ranks meet, and how an epoch's transport is made
    groups           gloo's and NCCL's process groups, told apart in one place
    group_transport  transfers and collectives in two such groups
    staging          tensors of a GPU over gloo, by way of the CPU

A group is made from the rendezvous store under the epoch's prefix, by explicit objects and not
through torch's global default group, so nothing of an old epoch can reach a new one. The same ranks
of neighbouring stages exchange hidden states; the ranks of one stage have a second group for the
sums and gathers of tensor parallelism. CPU tensors travel by gloo, CUDA tensors by NCCL.
"""
