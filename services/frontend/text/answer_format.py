"""The format of the answers to one prompt. The format decides how the answers are read and which
grammar they follow."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from services.frontend.request.json_schema.client_schema import ClientSchema
from services.frontend.text.formats.call_reader import CallRules
from services.frontend.text.formats.reasoning_format import ReasoningFormat
from services.frontend.text.formats.tool_format import ToolFormat
from services.frontend.text.message_reader import MessageReader, PlainReader


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """The format of the answers to one prompt. Makes a reader for each answer, and holds the
    grammar that the answers follow."""

    family: ToolFormat | None = None
    tools: Mapping[str, str] = field(default_factory=dict)
    """Schema of the arguments of each tool as a JSON text, keyed by the name of the tool."""
    is_single: bool = False
    """Whether an answer may have only one tool call."""
    must_call: bool = False
    """Whether an answer must call a tool."""
    is_exclusive: bool = False
    """Whether an answer consists either only of tool calls or only of a text that follows the
    client's grammar."""
    reasoning: ReasoningFormat | None = None
    is_thinking: bool = False
    """Whether the prompt ends inside the reasoning, so the answer begins with reasoning."""
    marks: Mapping[int, str] = field(default_factory=dict)
    """Special tokens whose texts the readers must see, each with its text."""
    end_tokens: tuple[int, ...] = ()
    """Tokens that end the answer, in addition to the tokens that the pipeline names."""
    grammar: str = ""
    """Grammar that answers follow in place of the client's grammar; empty if there is none."""
    grammar_field: str = ""
    """Field of the request that makes the grammar necessary."""
    schemas: Mapping[str, ClientSchema] = field(default_factory=dict)
    """Schemas of the tools whose schema the grammar does not enforce completely, keyed by the name
    of the tool."""

    def reader(self, request_id: str, index: int) -> MessageReader:
        """Returns a new reader for the answer with index `index` to a request."""
        reader: MessageReader = PlainReader()
        if self.family is not None:
            new_id = partial(_call_id, self.family, f"{request_id}-{index}")
            rules = CallRules(
                new_id=new_id,
                tools=self.tools,
                is_single=self.is_single,
                must_call=self.must_call,
                is_exclusive=self.is_exclusive,
            )
            reader = self.family.reader(rules)
        if self.reasoning is None:
            return reader
        return self.reasoning.reader(reader, has_begun=self.is_thinking, must_call=self.must_call)


PLAIN = AnswerFormat()


def _call_id(family: ToolFormat, answer: str, index: int) -> str:
    digest = hashlib.sha256(f"{answer}-{index}".encode()).hexdigest()
    return family.id_prefix + digest[: family.id_length]
