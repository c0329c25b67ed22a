"""Observers of requests and iterations: metrics and traces.

The serving loop and the service call the observers; the scheduling core does not depend on them.
"""
