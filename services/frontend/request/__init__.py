"""A client's request, independent of its protocol, and the rules that it must keep."""
