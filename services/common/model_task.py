"""The task for which clients mostly use a model. The launcher of a local system prints an example
of a request for this task."""

from typing import Literal

ModelTask = Literal["text", "chat", "vectors", "scores"]
"""Type of the tasks: to continue texts, to answer conversations, to compute embeddings of texts
("vectors"), or to compute scores of pairs of texts."""
