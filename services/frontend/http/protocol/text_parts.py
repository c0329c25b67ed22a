"""Reads a text that is given whole or as a list of parts."""

from collections.abc import Sequence
from typing import Protocol

from pydantic import Discriminator

from services.frontend.http.bodies.object_kinds import Unknown

TEXT_OR_LIST = Discriminator(lambda value: "list" if isinstance(value, list) else "text")
"""Discriminator that chooses the tag `list` for a list, and `text` for other values."""


class TextPart(Protocol):
    """A part of a text."""

    @property
    def text(self) -> str:
        """The text of the part."""


def joined(text: str | Sequence[TextPart | Unknown] | None) -> str:
    """Returns the whole text. Parts are joined by line ends."""
    if isinstance(text, str):
        return text
    return "\n".join(part.text for part in text or () if not isinstance(part, Unknown))
