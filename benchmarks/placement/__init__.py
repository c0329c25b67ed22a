"""Placement: one pool with many pipelines, beside routers in front of independent schedulers.

All of them run in virtual time (`simulator`), with the scheduling core that serves. A site
(`fleet.py`) is made of groups of pipelines. The pipelines of a group share one pool. A router
(`routers.py`) chooses the group of each request. So one pool is a single group, and a gateway in
front of replicas is a router in front of groups of one pipeline.
"""
