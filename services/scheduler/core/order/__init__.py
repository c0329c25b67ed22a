"""The orders of requests: which is admitted next, and which come into a batch."""
