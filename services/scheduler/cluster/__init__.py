"""Leadership and addresses: leases, terms, where the stages are, and the Kubernetes client that
both use.

It decides nothing about requests.
"""
