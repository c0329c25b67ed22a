"""Autoscaling by queued work: how many pipelines the leader wants, and how it gets their workers.

`size.py` decides, and has neither clock nor I/O. `load.py` measures the load, from which `size.py`
decides. `autoscaler.py` sets the number of workers. No module here knows requests, frontends or
Kubernetes.
"""
