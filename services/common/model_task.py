"""What clients mostly ask a model for. The launcher of a local system prints an example of it."""

from typing import Literal

ModelTask = Literal["text", "chat", "vectors", "scores"]
"""Type of the tasks: to continue texts, to answer conversations, to make vectors of texts, or
scores of pairs of texts."""
