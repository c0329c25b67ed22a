"""The command `orcinus`: serves a checkpoint by its name, and chats, checks, measures and watches.

The command starts services as programs and talks to them as clients do. Only `inspection.py`, which
runs in a process of its own, reads a checkpoint as the services would.
"""
