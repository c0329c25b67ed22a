"""The computation of one iteration on one rank: from a plan to hidden states or sampled tokens.

The engine has the request table, the K/V storage, the batch layout, the sampler, and the decode
iterations that are recorded as CUDA graphs. It uses no sockets, and does not depend on the numbers
of epochs or on other stages.
"""
