"""Placement: one pool of requests with many pipelines, compared with routers in front of
independent schedulers.

All of them run in virtual time (`simulator`), with the deployed scheduling core. A site
(`fleet.py`) is made of groups of pipelines. The pipelines of a group share one pool. A router
(`routers.py`) chooses the group of each request. So one pool is a site with a single group, and a
gateway in front of replicas is a site with a router in front of groups of one pipeline.
"""
