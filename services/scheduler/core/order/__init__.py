"""The orders of requests: which request is admitted next, and which requests come into a batch."""
