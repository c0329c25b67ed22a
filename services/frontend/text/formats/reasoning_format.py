"""Defines what a format of reasoning is: how it is recognised, its reader, and its grammar."""

from abc import ABC, abstractmethod

from services.frontend.text.formats.checkpoint import Checkpoint
from services.frontend.text.formats.grammar import Markers
from services.frontend.text.message_reader import MessageReader


class ReasoningFormat(ABC):
    """The format in which a family of models writes its reasoning, before the message itself."""

    name: str
    """Name of the format, for the setting `reasoning_parser`."""
    models: str
    """Names of the models that write the format, for the table in the docs."""
    markers: tuple[str, ...]
    """Texts that mark reasoning. If such a text is a special token of the checkpoint, the reader
    still sees the text."""

    @abstractmethod
    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the model of a checkpoint writes this format."""

    @abstractmethod
    def is_opened_by(self, prompt: str, *, begun: str = "") -> bool:
        """Returns whether a prompt ends inside reasoning, so the answer continues the reasoning.
        `prompt` is the end of the prompt, with special tokens. If the client has written the
        beginning of the answer, `prompt` ends with this beginning, which is `begun`. The reasoning
        may be opened in `begun` or directly before it."""

    @abstractmethod
    def reader(
        self, rest: MessageReader, *, has_begun: bool, must_call: bool = False
    ) -> MessageReader:
        """Returns a new reader of an answer. The reader takes the reasoning, and leaves everything
        else to the reader `rest`.

        `has_begun` says whether the answer begins inside the reasoning. With `must_call`, only
        calls may follow the reasoning: if the text ends with the beginning of a mark, this
        beginning does not become content.
        """

    @abstractmethod
    def grammar(self, markers: Markers, *, is_thinking: bool) -> str:
        """Returns the grammar rule `start`: first reasoning, then the rule `reply`. The reasoning
        may be left out, unless the prompt has begun the reasoning (`is_thinking`). The result also
        has the rules that `start` needs, except `TEXT`."""

    def message(self, rule: str, markers: Markers) -> str:
        """Returns a grammar expression for a message whose content follows the grammar rule `rule`.
        The marks around the content are included."""
        return rule
