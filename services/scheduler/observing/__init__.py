"""Observers of requests and iterations: metrics and traces.

Observers are called by the serving loop and the service; the scheduling core knows none of them.
"""
