"""The orders of requests: who is admitted next, and who comes into a batch."""
