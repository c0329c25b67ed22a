"""Defines what a format of tool calls is: how it is recognised, its reader, and its grammar."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from services.frontend.text.formats.call_reader import CallRules
from services.frontend.text.formats.checkpoint import Checkpoint
from services.frontend.text.formats.grammar import Markers, ToolRule
from services.frontend.text.message_reader import MessageReader


class ToolFormat(ABC):
    """The format in which a family of models writes tool calls."""

    name: ClassVar[str]
    """Name of the format, for the setting `tool_parser`."""
    models: ClassVar[str]
    """Names of the models that write the format, for the table in the docs."""
    markers: ClassVar[tuple[str, ...]]
    """Texts that mark calls. If such a text is a special token of the checkpoint, the reader still
    sees the text."""
    end_tokens: ClassVar[tuple[str, ...]] = ()
    """Special tokens that end a turn, even if the generation config does not name them."""
    id_prefix: ClassVar[str] = "call_"
    """Prefix of the id of a call."""
    id_length: ClassVar[int] = 24
    """Number of hexadecimal digits after the prefix in the id of a call."""
    before_content: ClassVar[str] = ""
    """Text that the model writes before content, also in answers to requests without tools."""
    has_bare_calls: ClassVar[bool] = False
    """Whether calls may come without a mark before them."""
    has_grammar: ClassVar[bool] = True
    """Whether there is a grammar that forces calls. If not, `grammar` must not be called."""
    has_parallel_calls: ClassVar[bool] = True
    """Whether one answer may hold several calls."""

    @abstractmethod
    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the model of a checkpoint writes this format."""

    @abstractmethod
    def reader(self, rules: CallRules) -> MessageReader:
        """Returns a new reader for an answer in this format."""

    @abstractmethod
    def grammar(
        self, tools: Sequence[ToolRule], markers: Markers, *, is_single: bool, is_free: bool
    ) -> str:
        """Returns the grammar rule `answer`, which allows calls or, if `is_free`, text with calls
        in it. If `is_single`, the rule allows at most one call. The result also has the rules that
        `answer` needs, except `TEXT` and the rules of arguments."""
