"""The command `orcinus`, with subcommands to serve a model, chat, check, measure, watch and tune.

The command starts services as separate programs, and calls them as any client does. Only
`inspection.py`, which runs in a process of its own, reads a checkpoint with the code of the
services.
"""
