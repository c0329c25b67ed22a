"""Code that at least two services need: errors, settings, gRPC plumbing, process life, logging.

The package imports no service, and contains no code for tensors or for scheduling.
"""
