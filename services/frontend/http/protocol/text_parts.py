"""Reads a text that is given whole or as a list of parts."""

from collections.abc import Sequence
from typing import Literal, Protocol

from pydantic import Discriminator

from services.frontend.http.bodies.object_kinds import ExactModel, Unknown
from services.frontend.http.protocol.unknown_items import is_noted, note_of

TEXT_OR_LIST = Discriminator(lambda value: "list" if isinstance(value, list) else "text")
"""Discriminator that chooses the tag `list` for a list, and `text` for other values."""


class TextPart(Protocol):
    """One part of a text that is given as a list of parts."""

    @property
    def text(self) -> str:
        """The text of the part."""


class RefusalPart(ExactModel):
    """A refusal by the assistant instead of a text. A client sends the refusal back unchanged."""

    type: Literal["refusal"]
    """Always `refusal`."""
    refusal: str
    """Text of the refusal."""

    @property
    def text(self) -> str:
        """The part's text."""
        return self.refusal


def joined(text: str | Sequence[TextPart | Unknown] | None) -> str:
    """Returns the whole text. Parts are joined by line ends. Of the parts with unsupported types,
    pictures are replaced by a note, and all others are left out. The text of None is empty."""
    if isinstance(text, str):
        return text
    kept = (part for part in text or () if is_noted(part) or not isinstance(part, Unknown))
    return result_text(tuple(kept))


def result_text(text: str | Sequence[TextPart | Unknown] | None) -> str:
    """Returns the text of a tool's result. Parts are joined by line ends. Each part of an
    unsupported type is replaced by a note. The text of None is empty."""
    if isinstance(text, str):
        return text
    return "\n".join(
        part.text if not isinstance(part, Unknown) else note_of(part) for part in text or ()
    )
