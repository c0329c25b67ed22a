"""What a format of reasoning is: how it is recognised, and its reader and its grammar."""

from abc import ABC, abstractmethod
from typing import ClassVar

from services.frontend.text.formats.checkpoint import Checkpoint
from services.frontend.text.formats.grammar import Markers
from services.frontend.text.message_reader import MessageReader


class ReasoningFormat(ABC):
    """The format in which a family of models writes its reasoning, before the message itself."""

    name: ClassVar[str]
    """Name by which the setting `reasoning_parser` selects the format."""
    models: ClassVar[str]
    """Models that write the format, for the table in the docs."""
    markers: ClassVar[tuple[str, ...]]
    """Texts that mark reasoning. In some checkpoints these texts are special tokens, which are
    shown to the reader."""

    @abstractmethod
    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the model of a checkpoint writes this format."""

    @abstractmethod
    def is_opened_by(self, prompt: str) -> bool:
        """Returns whether an answer begins with reasoning, given the end of its prompt with special
        tokens."""

    @abstractmethod
    def reader(
        self, rest: MessageReader, *, has_begun: bool, must_call: bool = False
    ) -> MessageReader:
        """Returns a new reader of an answer, which leaves all but the reasoning to `rest`.

        `has_begun` says whether the answer begins inside the reasoning. With `must_call`, only
        calls may follow the reasoning: if the text ends with the beginning of a mark, this
        beginning does not become content.
        """

    @abstractmethod
    def grammar(self, markers: Markers, *, is_thinking: bool) -> str:
        """Returns the rule `start` of a grammar, with the rules that it needs except `TEXT`: the
        rule `reply` after the reasoning. The reasoning may be left out, unless the prompt has begun
        the reasoning (`is_thinking`)."""
