"""What the protocols have in common: the body of a conversation, the reply to it, and its parts.

A protocol is a translation. Its body becomes a `GenerationRequest`, and its reply writes down what
the generation gives. No protocol has rules of its own about what may be asked for.
"""
