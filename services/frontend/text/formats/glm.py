"""Tool calls as GLM 4.5, 4.6 and 4.7 write them, after content.

    <tool_call>find
    <arg_key>what</arg_key>
    <arg_value>whales</arg_value>
    </tool_call>

GLM 4.7 writes no newlines between the tags.
"""

import re
from collections.abc import Sequence

from services.frontend.text.formats.arriving_text import SPACES, Steps
from services.frontend.text.formats.call_reader import CallRules
from services.frontend.text.formats.checkpoint import Checkpoint
from services.frontend.text.formats.grammar import Markers, ToolRule, one_of
from services.frontend.text.formats.parameter_grammar import ParameterGrammar, Spelling
from services.frontend.text.formats.parameter_reader import ParameterReader
from services.frontend.text.formats.tool_format import ToolFormat
from services.frontend.text.message_reader import MessageReader

BEGIN, END = "<tool_call>", "</tool_call>"

KEY, KEY_END = "<arg_key>", "</arg_key>"

VALUE, VALUE_END = "<arg_value>", "</arg_value>"

_NAME = re.compile(r"[^\s<>{}()\[\]\"']+")
_KEY_NAME = re.compile(r"[^<\n]+")


class Glm(ToolFormat):
    """The format of tool calls of GLM 4.5 and 4.6."""

    name = "glm45"
    models = "GLM 4.5, GLM 4.6"
    markers = (BEGIN, END, KEY, KEY_END, VALUE, VALUE_END)
    newline = "\n"
    """Text between two tags of a call."""

    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the model of a checkpoint writes this format: the chat template contains
        the tags `<tool_call>` and `<arg_key>`."""
        return KEY in checkpoint.template and BEGIN in checkpoint.template

    def reader(self, rules: CallRules) -> MessageReader:
        return GlmReader(rules)

    def grammar(
        self, tools: Sequence[ToolRule], markers: Markers, *, is_single: bool, is_free: bool
    ) -> str:
        answer = markers.answer(
            BEGIN, "body", is_free=is_free, is_single=is_single, between=self.newline
        )
        between = f"{KEY_END}{self.newline}{VALUE}"
        spelling = Spelling(
            before_name=KEY,
            after_name=between,
            after_value_name=between,
            name_end="<",
            end=VALUE_END,
            after=self.newline,
        )
        parameters = ParameterGrammar(markers, spelling)
        rules = one_of(
            tools,
            lambda tool: f"{markers.written(tool.name + self.newline)} {parameters.of(tool)}",
        )
        return "\n".join([f"{answer}body: call {markers[END]}\n{rules}", *parameters.rules.lines])


class Glm47(Glm):
    """The format of tool calls of GLM 4.7."""

    name = "glm47"
    models = "GLM 4.7"
    newline = ""

    def is_written_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the model of a checkpoint writes this format: the chat template contains
        the tag `<tool_call>`, and `{function-name}<arg_key>` without a newline in between."""
        return f"{{function-name}}{KEY}" in checkpoint.template and BEGIN in checkpoint.template


class GlmReader(ParameterReader):
    """Reads an answer with tool calls in the format of GLM."""

    marks = (BEGIN, END)

    def _read(self) -> Steps[None]:
        text = self._text
        while (yield from self._until(BEGIN)):
            text.keep()
            text.take(len(BEGIN))
            yield from text.run(SPACES)
            if (yield from text.peek()) == "{":
                is_read = yield from self._read_calls()
            else:
                is_read = yield from self._read_named()
            if is_read:
                yield from self._skip_marks(END, VALUE_END)
            self._say_no_call(text.kept())

    def _read_named(self) -> Steps[bool]:
        """Reads the name of a tool and its arguments. Returns False if no call comes next."""
        text = self._text
        name = yield from text.run(_NAME)
        yield from text.run(SPACES)
        if not name or not (yield from text.comes_next(KEY, END)):
            yield from text.skip_cut(KEY, END)
            return False
        self._begin_object(name)
        while (yield from self._read_argument()):
            pass
        return True

    def _read_argument(self) -> Steps[bool]:
        """Reads an argument of a call. Returns False at the end of the arguments."""
        text = self._text
        text.keep()
        yield from text.run(SPACES)
        if (yield from text.take_one(KEY)):
            name = (yield from text.run(_KEY_NAME)).strip()
            is_closed = yield from text.take_one(KEY_END)
            yield from text.run(SPACES)
            if name and is_closed and (yield from text.take_one(VALUE)):
                text.kept()
                return (yield from self._read_value(name, VALUE_END, self._parameters.types(name)))
        elif (yield from text.take_one(END)):
            text.kept()
            self._end_object()
            return False
        yield from self._end_broken_object(KEY, KEY_END, VALUE, END)
        return False
