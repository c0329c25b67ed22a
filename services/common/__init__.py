"""Code that at least two services need: errors, settings, gRPC plumbing, process life, logging.

Imports none of the services, and knows neither tensors nor scheduling.
"""
