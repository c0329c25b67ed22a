"""Tool calls as Functionary 3.1 writes them, after content.

Let me see.<function=find>{"what": "whales"}</function>
"""

import re
from collections.abc import Sequence

from services.frontend.request.output_format import quoted
from services.frontend.text.formats.arriving_text import SPACES, Steps
from services.frontend.text.formats.call_reader import CallRules, ToolCallReader
from services.frontend.text.formats.checkpoint import Checkpoint
from services.frontend.text.formats.grammar import Markers, ToolRule, one_of
from services.frontend.text.formats.tool_format import ToolFormat
from services.frontend.text.message_reader import MessageReader

BEGIN, END = "<function=", "</function>"

_NAME = re.compile(r"[\w.-]+")


class Functionary31(ToolFormat):
    """The format of Functionary 3.1."""

    name = "functionary_v31"
    models = "Functionary 3.1"
    markers = ()

    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the template holds the tags of calls."""
        return BEGIN in checkpoint.template and END in checkpoint.template

    def reader(self, rules: CallRules) -> MessageReader:
        """Returns a new reader for an answer."""
        return Functionary31Reader(rules)

    def grammar(
        self, tools: Sequence[ToolRule], markers: Markers, *, is_single: bool, is_free: bool
    ) -> str:
        """Returns the rule `answer` of a grammar: calls, or text with calls in it if `is_free`."""
        answer = markers.answer(BEGIN, "call", is_free=is_free, is_single=is_single)
        return answer + one_of(
            tools, lambda tool: f"{quoted(f'{tool.name}>')} {tool.arguments} {quoted(END)}"
        )


class Functionary31Reader(ToolCallReader):
    """Reads an answer in the format of Functionary 3.1."""

    def _read(self) -> Steps[None]:
        text = self._text
        while (yield from self._until(BEGIN)):
            text.keep()
            text.take(len(BEGIN))
            name = yield from text.run(_NAME)
            is_named = bool(name) and (yield from text.take_one(">"))
            yield from text.run(SPACES)
            if is_named and (yield from self._read_object_of(name, END)):
                yield from self._skip_marks("}", END)
            self._say_no_call(text.kept())
