"""A client's request, independent of the protocol, and the rules for requests."""
