"""The interface of an outlet, which sends pieces of answers to the client as soon as their tokens
come.

The task that reads a generation sleeps between tokens. Waking the task costs as much as writing a
token to the client. So while the task sleeps, pieces are sent through an outlet instead of waking
it.
"""

from typing import Protocol

from services.frontend.generation.answer import Piece


class Outlet(Protocol):
    """Sends pieces of answers to the client without waking the task that reads the generation."""

    @property
    def is_ready(self) -> bool:
        """Whether the outlet can send a piece now."""

    def take(self, piece: Piece) -> None:
        """Sends a piece of an answer to the client."""

    def take_text(self, index: int, text: str) -> None:
        """Sends new text of the answer with the given index. The client gets only the text. The
        first text of an answer must not be sent by this method."""
