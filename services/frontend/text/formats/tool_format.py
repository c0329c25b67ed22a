"""What a format of tool calls is: how it is recognised, and its reader and its grammar."""

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
    """Name by which the setting `tool_parser` selects the format."""
    models: ClassVar[str]
    """Models that write the format, for the table in the docs."""
    markers: ClassVar[tuple[str, ...]]
    """Texts that mark calls. In some checkpoints these texts are special tokens, which are shown to
    the reader."""
    end_tokens: ClassVar[tuple[str, ...]] = ()
    """Special tokens that end a turn, whether or not the generation config names them."""
    id_prefix: ClassVar[str] = "call_"
    """Beginning of the id of a call."""
    id_length: ClassVar[int] = 24
    """Number of hexadecimal digits in the id after the prefix."""
    before_content: ClassVar[str] = ""
    """Text that the model writes before content, in answers to requests without tools too."""
    has_bare_calls: ClassVar[bool] = False
    """Whether calls are JSON without a mark that introduces them."""
    has_grammar: ClassVar[bool] = True
    """Whether calls can be forced. Otherwise `grammar` is never called."""
    has_parallel_calls: ClassVar[bool] = True
    """Whether one answer may hold several calls."""

    @abstractmethod
    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the model of a checkpoint writes this format."""

    @abstractmethod
    def reader(self, rules: CallRules) -> MessageReader:
        """Returns a new reader for an answer."""

    @abstractmethod
    def grammar(
        self, tools: Sequence[ToolRule], markers: Markers, *, is_single: bool, is_free: bool
    ) -> str:
        """Returns the rule `answer` of a grammar, with the rules that it needs except `TEXT` and
        those of arguments. The rule allows calls, or text with calls in it if `is_free`, and one
        call at most if `is_single`."""
