"""Autoscaling by queued work: how many pipelines are wanted, and how the number of workers follows.

`size.py` decides, and has neither clock nor I/O. `load.py` measures the load, from which `size.py`
decides. `autoscaler.py` sets the number of workers. No module here depends on requests, frontends
or Kubernetes.
"""
