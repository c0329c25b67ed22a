"""One iteration on one rank: a plan's columns in, hidden states or sampled tokens out.

It owns the request table, the K/V storage, the batch layout, the sampler and the recorded decodes
of an epoch. It knows no sockets, no epochs and no other stage.
"""
