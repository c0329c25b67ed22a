"""The common parts of the protocols: the base classes of bodies and replies, the routes, and the
errors.

A protocol only translates. The body of a protocol becomes a `GenerationRequest`, and the reply of
the protocol writes the pieces of the generation. The rules for the values of a request are the same
for all protocols, and are checked by `GenerationRequest`.
"""
