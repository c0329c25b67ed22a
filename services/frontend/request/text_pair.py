"""A prompt that consists of two texts, which the model compares."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two texts that are tokenized separately, with the special tokens that the checkpoint puts
    around and between two texts."""

    first: str
    second: str

    @property
    def n_characters(self) -> int:
        """Number of characters of both texts."""
        return len(self.first) + len(self.second)

    @property
    def text(self) -> str:
        """The two texts, one directly after the other."""
        return self.first + self.second
