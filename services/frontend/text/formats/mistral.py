"""Tool calls as Mistral's models write them, after content.

    [TOOL_CALLS][{"name": "find", "arguments": {"what": "whales"}}]
    [TOOL_CALLS]find[ARGS]{"what": "whales"}

Version 3 of Mistral's tokenizers writes the first form. Versions 11 and 13 write the second, with
or without `[CALL_ID]` and `[ARGS]`. Mistral's templates require ids of nine letters and digits.
"""

import re
from collections.abc import Sequence

from services.frontend.request.output_format import quoted
from services.frontend.text.formats.arriving_text import SPACES, Steps
from services.frontend.text.formats.call_reader import CLOSING, CallRules, ToolCallReader
from services.frontend.text.formats.checkpoint import Checkpoint
from services.frontend.text.formats.grammar import (
    Markers,
    ToolRule,
    call_object,
    one_of,
    repeated,
)
from services.frontend.text.formats.tool_format import ToolFormat
from services.frontend.text.message_reader import MessageReader

BEGIN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

_NAME = re.compile(r"[\w.-]+")


class Mistral(ToolFormat):
    """The format of tool calls of Mistral."""

    name = "mistral"
    models = "Mistral, Ministral, Devstral, Magistral"
    markers = (BEGIN, CALL_ID, ARGS)
    id_prefix, id_length = "", 9

    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the model of a checkpoint writes this format: `[TOOL_CALLS]` is in the
        chat template or is a special token."""
        return checkpoint.has(BEGIN)

    def reader(self, rules: CallRules) -> MessageReader:
        return MistralReader(rules)

    def grammar(
        self, tools: Sequence[ToolRule], markers: Markers, *, is_single: bool, is_free: bool
    ) -> str:
        """Returns the rule `answer` of a grammar. The rule allows tool calls. With `is_free`, the
        rule also allows text and then calls."""
        if markers.is_special(ARGS):
            body = one_of(tools, lambda tool: _named_call(tool, markers))
            marked = "call"
        else:
            calls = repeated("call", ", ", is_single=is_single)
            body = f'list: " "? "[" {calls} "]"\n{one_of(tools, call_object("arguments"))}'
            marked, is_single = "list", True
        return markers.answer(BEGIN, marked, is_free=is_free, is_single=is_single) + body


def _named_call(tool: ToolRule, markers: Markers) -> str:
    return f"{quoted(tool.name)} {markers[ARGS]} {tool.arguments}"


class MistralReader(ToolCallReader):
    """Reads an answer with tool calls in the format of Mistral."""

    marks = (BEGIN,)

    def _read(self) -> Steps[None]:
        text = self._text
        while (yield from self._until(BEGIN)):
            text.keep()
            text.take(len(BEGIN))
            yield from text.run(SPACES)
            if (yield from text.peek()) in ("{", "["):
                is_read = yield from self._read_calls()
            else:
                is_read = yield from self._read_named()
            if is_read:
                text.kept()
            self._say_no_call(text.kept())

    def _read_named(self) -> Steps[bool]:
        """Reads a call whose name comes before its arguments. Returns False if no such call comes
        next."""
        text = self._text
        name = yield from text.run(_NAME)
        yield from text.skip(CALL_ID)
        yield from text.run(_NAME)
        yield from text.skip(ARGS)
        yield from text.run(SPACES)
        if not name or not (yield from text.begins_with("{")):
            return False
        self._begin(name)
        if (yield from text.json_value(self._argue)):
            self._end_call()
            yield from text.run(CLOSING)
        return True
