"""The format in which the served model writes messages. The format decides how answers are read. It
also decides the grammar that makes the model call tools, or follow a client's grammar after its
reasoning.

Operators set the format, or it is derived from the chat template and the special tokens of the
checkpoint. If the format is unknown, the whole text is content, and no call can be forced.
"""

import itertools
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from services.common import errors
from services.frontend.request import output_format
from services.frontend.request.conversation import Conversation, Tool, ToolChoice
from services.frontend.request.json_schema.client_schema import AdditionalProperties, ClientSchema
from services.frontend.request.output_format import ANY_OBJECT
from services.frontend.text.answer_format import AnswerFormat
from services.frontend.text.formats.checkpoint import Checkpoint
from services.frontend.text.formats.grammar import TEXT, Markers, ToolRule
from services.frontend.text.formats.reasoning_format import ReasoningFormat
from services.frontend.text.formats.registry import REASONING_FORMATS, TOOL_FORMATS
from services.frontend.text.formats.tool_format import ToolFormat
from services.frontend.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Format = TypeVar("Format", ToolFormat, ReasoningFormat)

TAIL_TOKENS = 48
"""Number of tokens at the end of a prompt in which the tag that opens the reasoning is looked
for."""

MAX_BLAMED = 16
"""Largest number of tools whose schemas are checked one by one, if the grammar of all tools cannot
be followed."""


class MessageFormat:
    """Knows the format in which the model of a checkpoint writes tool calls, reasoning and content,
    and makes from it the format of the answers to a conversation."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        *,
        renders_parallel_calls: bool = True,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
        additional_properties: AdditionalProperties = "declared",
    ) -> None:
        """`template` is the source of the chat template. `renders_parallel_calls` says whether the
        template can show several calls in one turn; if not, answers have at most one call.
        `tool_parser` and `reasoning_parser` are names of formats, `auto` or `none`."""
        self._renders_parallel_calls = renders_parallel_calls
        self._tokenizer = tokenizer
        self._additional_properties = additional_properties
        checkpoint = Checkpoint(template, tokenizer.special_tokens)
        self._family = _chosen(TOOL_FORMATS, tool_parser, checkpoint)
        self._reasoning = _chosen(REASONING_FORMATS, reasoning_parser, checkpoint)
        if template and self._family is None and tool_parser == "auto":
            log.info(
                "no known format of tool calls in the chat template: calls of tools are content, "
                "and no call can be forced; the setting tool_parser names a format"
            )
        self._special = tokenizer.special_tokens(
            (*_markers(self._family), *_markers(self._reasoning))
        )

    @property
    def tools(self) -> str:
        """Name of the format of tool calls, or `none` if no format is set or known."""
        return "none" if self._family is None else self._family.name

    @property
    def reasoning(self) -> str:
        """Name of the format of reasoning, or `none` if no format is set or known."""
        return "none" if self._reasoning is None else self._reasoning.name

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end a turn according to the format of messages. The checkpoint's generation
        config may name further tokens."""
        names = () if self._family is None else self._family.end_tokens
        return tuple(self._tokenizer.special_tokens(names).values())

    @property
    def thinks(self) -> bool:
        """Whether the model may begin answers with reasoning."""
        return self._reasoning is not None

    def of(
        self,
        conversation: Conversation,
        token_ids: Sequence[int],
        *,
        asked: str = "",
        asked_field: str = "format",
    ) -> AnswerFormat:
        """Returns the format of the answers to a conversation. `token_ids` are the tokens of the
        rendered conversation. `asked` is the grammar that the client requests in the field
        `asked_field`. If `asked` is not empty, answers call tools or follow this grammar, after the
        reasoning.

        Raises:
            InvalidRequest: a tool must be called, but the model cannot be forced to call one; or
            calls could not be distinguished from the output that the client asks for.
        """
        choice = conversation.tool_choice
        must_call = choice.mode in ("required", "named")
        if must_call:
            self._check_can_force()
        tools = () if choice.mode == "none" else conversation.tools
        family = self._family if tools or self._before_content else None
        is_thinking = self._opens_reasoning(conversation, token_ids)
        shown = (*_markers(family), *_markers(self._reasoning))
        grammar = ""
        schemas: dict[int, ClientSchema] = {}
        held = family if tools and family is not None and family.has_grammar else None
        has_rules = held is not None and (must_call or any(map(_is_held, tools)))
        is_framed = self.thinks or bool(self._before_content)
        if has_rules or (asked and (held is not None or is_framed)):
            if asked and held is not None and held.has_bare_calls:
                _check_json(asked, asked_field)
            schemas = self.schemas_of(conversation) if held is not None else {}
            grammar = self._grammar(
                held, conversation, schemas, is_thinking=is_thinking, asked=asked
            )
        return AnswerFormat(
            family=family,
            tools={tool.name: tool.parameters for tool in tools},
            is_single=self._is_single(choice),
            must_call=must_call,
            is_exclusive=bool(asked),
            reasoning=self._reasoning,
            is_thinking=is_thinking,
            marks={self._special[text]: text for text in shown if text in self._special},
            grammar=grammar,
            end_tokens=self.end_tokens,
            grammar_field="tool_choice" if must_call else asked_field if asked else "tools",
            schemas={
                conversation.tools[number].name: schema
                for number, schema in schemas.items()
                if schema.unenforced
            },
        )

    @property
    def _before_content(self) -> str:
        """The text that the model writes before content."""
        return "" if self._family is None else self._family.before_content

    def schemas_of(self, conversation: Conversation) -> dict[int, ClientSchema]:
        """Returns the schemas that the arguments of calls must match, keyed by the index of the
        tool. Tools whose arguments may be any object are left out.

        Raises:
            InvalidRequest: a schema does not describe an object, or is too long.
        """
        is_free = conversation.tool_choice.mode == "auto"
        return {
            number: _schema_of(tool, number, self._additional_properties)
            for number, tool in _callable_tools(conversation)
            if _is_held(tool) or not is_free
        }

    def _is_single(self, choice: ToolChoice) -> bool:
        """Returns whether an answer may have only one call, because the client requests only one or
        because the chat template cannot show several calls of one turn in the next prompt."""
        is_one_asked = not choice.allows_parallel or choice.mode == "named"
        return is_one_asked or not self._renders_parallel_calls

    def _check_can_force(self) -> None:
        """Raises InvalidRequest if the model cannot be forced to call tools."""
        if self._family is None:
            raise errors.InvalidRequest(
                "tool_choice",
                "cannot force a call: no format of tool calls is known for the model; the server's "
                "setting tool_parser names one",
            )
        if not self._family.has_grammar:
            raise errors.InvalidRequest(
                "tool_choice",
                f"cannot force a call: the model's format {self._family.name!r} has no grammar",
            )

    def _opens_reasoning(self, conversation: Conversation, token_ids: Sequence[int]) -> bool:
        """Returns whether a conversation's prompt ends inside reasoning. `token_ids` are the tokens
        of the prompt."""
        if self._reasoning is None:
            return False
        begun = (conversation.messages[-1].content or "") if conversation.continues_last else ""
        tail = self._tokenizer.to_marked_text(token_ids[-TAIL_TOKENS - len(begun) :])
        return self._reasoning.is_opened_by(tail, begun=begun)

    def _grammar(
        self,
        family: ToolFormat | None,
        conversation: Conversation,
        schemas: dict[int, ClientSchema],
        *,
        is_thinking: bool,
        asked: str,
    ) -> str:
        """Returns the grammar of answers: first reasoning, if the model reasons, and then calls of
        tools, or a text that follows the grammar `asked`. Keywords that the format cannot enforce
        are noted in `schemas`."""
        markers = Markers(self._special)
        rules = (
            ""
            if family is None
            else self._call_rules(family, conversation, schemas, has_other=bool(asked))
        )
        start = (
            self._reasoning.grammar(markers, is_thinking=is_thinking)
            if self._reasoning
            else "start: reply"
        )
        if not asked:
            return "\n".join([start, "reply: answer", rules, TEXT])
        parts = output_format.parts(asked)
        other = f"@{parts[0]['name']}"
        if self._reasoning is not None:
            other = self._reasoning.message(other, markers)
        if self._before_content:
            other = f"{output_format.quoted(self._before_content)} {other}"
        reply = f"reply: answer | {other}" if family is not None else f"reply: {other}"
        lark = "\n".join([start, reply, rules, TEXT])
        return json.dumps({"grammars": [{"lark_grammar": lark}, *parts]}, ensure_ascii=False)

    def _call_rules(
        self,
        family: ToolFormat,
        conversation: Conversation,
        schemas: dict[int, ClientSchema],
        *,
        has_other: bool,
    ) -> str:
        """Returns the grammar rule `answer`. If the model may choose whether to call a tool, and
        the client requests no other grammar (`has_other` is false), the rule allows text with calls
        in it. Otherwise the rule allows only calls. Arguments must match the schema of their tool
        if `schemas` has that schema."""
        choice, markers = conversation.tool_choice, Markers(self._special)
        is_free = choice.mode == "auto"
        is_single = self._is_single(choice)
        is_text = is_free and not has_other
        rules = []
        for number, tool in _callable_tools(conversation):
            kept = schemas.get(number)
            rules.append(
                ToolRule(
                    tool.name,
                    f"arguments_{number}",
                    kept.enforced if kept is not None else ANY_OBJECT,
                    is_strict=tool.is_strict,
                    schema_field=kept.field if kept is not None else "",
                )
            )
        parts = [family.grammar(rules, markers, is_single=is_single, is_free=is_text)]
        parts += [f"{rule.arguments}: {output_format.json_rule(rule.schema)}" for rule in rules]
        for (number, _), rule in zip(_callable_tools(conversation), rules, strict=True):
            if rule.unenforced and number in schemas:
                schemas[number] = replace(schemas[number], not_in_format=tuple(rule.unenforced))
        return "\n".join(parts)


def schema_grammars(schemas: Iterable[ClientSchema]) -> Iterator[tuple[str, str]]:
    """Yields, for each of the first `MAX_BLAMED` schemas, the name of its field in the request and
    its grammar."""
    for schema in itertools.islice(schemas, MAX_BLAMED):
        yield schema.field, output_format.json_schema(schema)


def _callable_tools(conversation: Conversation) -> list[tuple[int, Tool]]:
    """Returns the tools that the model may call, each with its index among the tools of the
    conversation."""
    choice = conversation.tool_choice
    return [
        (number, tool)
        for number, tool in enumerate(conversation.tools)
        if choice.mode != "named" or tool.name == choice.name
    ]


def _is_held(tool: Tool) -> bool:
    """Returns whether arguments must match the schema of a tool even if the model may choose
    whether to call the tool."""
    return tool.is_strict or tool.is_held


def _chosen(formats: Mapping[str, Format], name: str, checkpoint: Checkpoint) -> Format | None:
    """Returns the format with the name `name`. For the name `auto`, returns the first format that
    the model of a checkpoint writes. Returns None if there is no such format."""
    if name != "auto":
        return formats.get(name)
    return next((one for one in formats.values() if one.is_written_by(checkpoint)), None)


def _markers(one: ToolFormat | ReasoningFormat | None) -> tuple[str, ...]:
    return one.markers if one is not None else ()


def _check_json(grammar: str, field: str) -> None:
    """Raises InvalidRequest unless the client's grammar is made from a JSON schema. Called if the
    model writes no mark before calls. Such calls are recognised only as JSON with the name of a
    tool, so other text could be mistaken for them."""
    if not output_format.parts(grammar)[0].get("json_schema"):
        raise errors.InvalidRequest(
            field, "goes together with tools only as JSON, since the model's calls have no mark"
        )


def _schema_of(
    tool: Tool, number: int, additional_properties: AdditionalProperties
) -> ClientSchema:
    """Returns the schema of a tool's arguments.

    Raises:
        InvalidRequest: the schema does not describe an object, or is too long.
    """
    field = f"tools.{number}.function.parameters"
    schema = ANY_OBJECT | output_format.read_schema(tool.parameters or "{}", field)
    if schema["type"] != "object":
        raise errors.InvalidRequest(field, "must be a schema of type 'object'")
    return ClientSchema(
        schema,
        field,
        is_strict=tool.is_strict,
        additional_properties=additional_properties,
        parameters=tool.parameters,
    )
