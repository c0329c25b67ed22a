"""The field, in a client's request for embeddings or scores, that has the texts."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextsField:
    """A field with a list of texts, or with one text."""

    name: str
    is_single: bool = False
    """Whether the field has one text, and no list."""

    def item(self, index: int) -> str:
        """Returns the name by which an error refers to the text with the index `index`."""
        return self.name if self.is_single else f"{self.name}[{index}]"
