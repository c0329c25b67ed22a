"""The interface of an outlet, which sends pieces of answers to the client as soon as their tokens
come.

The task that reads a generation sleeps between tokens. To wake the task costs as much as to write a
token to the client. So while the task waits, pieces are sent through an outlet without waking it.
"""

from typing import Protocol

from services.frontend.generation.answer import Piece


class Outlet(Protocol):
    """Sends pieces to the client without a task."""

    @property
    def is_ready(self) -> bool:
        """Whether a piece can be taken now."""

    def take(self, piece: Piece) -> None:
        """Sends a piece."""

    def take_text(self, index: int, text: str) -> None:
        """Sends new text of the answer with the given index. The text must not be the first of its
        answer, and nothing but text is sent."""
