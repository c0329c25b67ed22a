"""A checkpoint that talks, served as users serve it, and the clients that users have, unmodified.

`make test-real` makes what these tests need: the checkpoints of `models/smollm2.py` and
`models/minilm.py`, and a virtual environment with the clients, whose requirements contradict those
of the project.
"""
