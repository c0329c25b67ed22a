"""The data plane: transfers of activations between ranks, in the process groups of one epoch.

    transport        the protocols of the data plane, and a rank's place in its pipeline
    rendezvous       the store in which ranks meet, and the making of an epoch's transport
    groups           process groups of gloo and NCCL, with their differences
    group_transport  transfers and collectives in two process groups
    staging          transfers of GPU tensors by gloo, with copies in CPU memory

Groups are made from the rendezvous store with a prefix for the epoch, and not through torch's
global default group, so that no message of an old epoch can reach a new one. Ranks with equal
numbers in neighbouring stages exchange hidden states. The ranks of a stage have a second process
group, for the sums and gathers of tensor parallelism. CPU tensors are transferred by gloo, CUDA
tensors by NCCL or through `staging`.
"""
