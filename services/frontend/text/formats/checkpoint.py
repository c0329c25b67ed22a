"""The parts of a checkpoint from which the format of its model's messages is recognised."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint's chat template and special tokens."""

    template: str
    """Source of the chat template; empty if there is none."""
    special_tokens: Callable[[Iterable[str]], Mapping[str, int]]
    """Function that takes texts and returns the token id of each text that is a special token,
    keyed by the text."""

    def is_special(self, text: str) -> bool:
        """Returns whether a text is a special token."""
        return bool(self.special_tokens((text,)))

    def has(self, *texts: str) -> bool:
        """Returns whether each of the texts occurs in the chat template or is a special token."""
        return all(text in self.template or self.is_special(text) for text in texts)
