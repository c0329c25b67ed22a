"""The computation of one iteration on one rank: from a plan to hidden states or sampled tokens.

The engine holds the request table, the K/V storage, the batch layout, the sampler and the recorded
decodes of an epoch. The engine uses no sockets, and does not depend on the numbers of epochs or on
other stages.
"""
