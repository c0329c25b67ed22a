"""The election of a leading scheduler, the addresses of the stages, and the Kubernetes client that
both use.

This package decides nothing about requests.
"""
