"""The computation of one iteration on one rank: from a plan to hidden states or sampled tokens.

The engine holds the request table, the K/V storage, the batch layout, the sampler and the recorded
decodes of an epoch. The engine has no sockets, and knows neither the numbers of epochs nor other
stages.
"""
