"""A text that is kept in parts. The parts are joined only when the text is tokenized.

The prompts of a request may repeat a long part, such as the query that is compared with each of a
thousand documents. All prompts share the memory of such a part.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextParts:
    """A text that is kept in parts. Other texts may share the parts."""

    parts: tuple[str, ...]

    @property
    def n_characters(self) -> int:
        """Number of characters of the text."""
        return sum(map(len, self.parts))

    @property
    def text(self) -> str:
        """The parts as one text."""
        return "".join(self.parts)
