"""Base classes of bodies with a conversation, for protocols other than OpenAI's chat completions.

The rules of requests are checked for all protocols in one place, `GenerationRequest`. If a rule
names a field that the protocol spells differently, the name in the error is replaced by the
protocol's spelling.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from services.common import errors
from services.common.sampling import OPTIONS, SamplingParams
from services.frontend.http.bodies.metadata import FEW_LABELS, MAX_METADATA
from services.frontend.http.bodies.object_kinds import ExactModel
from services.frontend.http.bodies.ranges import option
from services.frontend.http.protocol.body import RequestBody
from services.frontend.http.protocol.conversation_tools import ClientTool
from services.frontend.request.conversation import ChatMessage, Conversation, ToolChoice
from services.frontend.request.generation_request import GenerationOptions, GenerationRequest
from services.frontend.request.output_format import OutputFormat

Metadata = Annotated[
    dict[str, Annotated[str, Field(max_length=512)]] | None,
    FEW_LABELS,
    Field(json_schema_extra={"maxProperties": MAX_METADATA}),
]
"""Type of labels that the client gives to the request, and that the answer repeats."""


class ConversationBody(ExactModel, ABC):
    """The common fields of bodies of conversations, and the conversion of a body to a
    `Conversation`."""

    spelling: ClassVar[Mapping[str, str]]
    """Maps names of fields in `GenerationRequest` to the protocol's names, for names that
    differ."""

    model: str | None = None
    """Name of the model; may be left out if the caller may use only one."""

    def to_conversation(self) -> Conversation:
        """Returns the conversation to continue.

        Raises:
            InvalidRequest: the turns contradict each other.
        """
        messages = tuple(self._messages())
        continues_last = self._continues_last(messages)
        return Conversation(
            messages,
            tools=tuple(tool.to_tool() for tool in self._shown_tools.values()),
            tool_choice=self._choice,
            template_kwargs=self._template_kwargs,
            adds_generation_prompt=not continues_last,
            continues_last=continues_last,
        )

    @contextmanager
    def in_own_words(self) -> Iterator[None]:
        """Returns a context manager that catches an InvalidRequest and raises it with the
        protocol's name for the wrong field."""
        try:
            yield
        except errors.InvalidRequest as error:
            field = self.spelled(error.field)
            if field == error.field:
                raise
            raise error.renamed(field) from error

    @property
    @abstractmethod
    def _shown_tools(self) -> Mapping[str, ClientTool]:
        """The tools that the model sees, keyed by the path of the tool in the body: `tools.0`."""

    @property
    @abstractmethod
    def _choice(self) -> ToolChoice:
        """Whether the model may, must or must not call a tool."""

    @property
    @abstractmethod
    def _template_kwargs(self) -> dict[str, Any]:
        """Variables for the chat template."""

    @abstractmethod
    def _messages(self) -> Iterator[ChatMessage]:
        """Yields the messages of the conversation."""

    def _continues_last(self, messages: Sequence[ChatMessage]) -> bool:
        """Returns whether the answer continues the last message instead of beginning a turn."""
        return False

    def spelled(self, field: str) -> str:
        """Returns the protocol's name for a field. `field` is the name in `GenerationRequest`,
        which all protocols share."""
        match field.split("."):
            case ["tools", number, "function", name, *rest]:
                place = list(self._shown_tools)[int(number)]
                return ".".join([f"{place}.{self.spelling.get(name, name)}", *rest])
            case [first, *rest]:
                return ".".join([self.spelling.get(first, first), *rest])
        return field


class GeneratingBody(ConversationBody, RequestBody):
    """The common fields of bodies that ask for an answer to a conversation."""

    temperature: Annotated[float | None, option("temperature")] = None
    top_p: Annotated[float | None, option("top_p")] = None
    top_k: Annotated[int | None, option("top_k")] = None
    seed: Annotated[int | None, option("seed")] = None

    @property
    @abstractmethod
    def output_format(self) -> OutputFormat:
        """The requested format of the output.

        Raises:
            InvalidRequest: no grammar can be made of the format.
        """

    @abstractmethod
    def options(self, sampling: SamplingParams) -> GenerationOptions:
        """Returns the options of the request, which include `sampling`."""

    def to_request(self) -> GenerationRequest:
        given = {
            name: value
            for name in ("temperature", "top_p", "top_k", "seed")
            if (value := getattr(self, name)) is not None
        }
        options = self.options(SamplingParams(**given)).with_format(self.output_format)
        options = replace(
            options,
            defaulted=OPTIONS.keys() - given.keys(),
            cache_salt=self.cache_salt or "",
            cache_prompt=self.cache_prompt is not False,
            receipt=bool(self.receipt),
        )
        if self.priority is not None:
            options = replace(options, priority=self.priority)
        return GenerationRequest(
            prompts=(self.to_conversation(),), options=options, model=self.model or ""
        )
