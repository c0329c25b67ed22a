"""Two texts as one prompt, which the model compares."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two texts that are tokenized apart, with the special tokens that the checkpoint puts around
    and between two texts."""

    first: str
    second: str

    @property
    def n_characters(self) -> int:
        """Number of characters of both texts."""
        return len(self.first) + len(self.second)

    @property
    def text(self) -> str:
        """Both texts as one."""
        return self.first + self.second
