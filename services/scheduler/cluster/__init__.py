"""Who leads and where the stages are: leases, terms, addresses of stages, and the Kubernetes client
that both use.

It decides nothing about requests.
"""
