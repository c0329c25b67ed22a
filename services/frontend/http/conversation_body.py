"""The body of a conversation in a protocol other than OpenAI's chat completions.

Such a protocol is a translation: its body becomes a `GenerationRequest`, and its `Reply` writes
down what comes back. The rules of requests are checked where all requests are checked; where they
name a field that is spelled differently here, the error is spelled so too.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import pydantic_core
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
)
from pydantic_core import core_schema

from services.common import errors
from services.common.sampling import OPTIONS, SamplingParams
from services.frontend.generation.generation import Generation
from services.frontend.http.exchange import Event
from services.frontend.http.reply import Reply
from services.frontend.http.type_errors import MAX_NAME_LENGTH
from services.frontend.request.conversation import Conversation
from services.frontend.request.generation_request import GenerationOptions, GenerationRequest

MAX_TOOL_NAME = 128
"""Characters of a tool's name at most."""

MAX_METADATA = 16
"""Items of metadata at most."""

EXACT = ConfigDict(extra="forbid", strict=True)
"""Fields that nobody knows are left out by `body_reader`, such as those that ask for a cache."""

ToolName = Annotated[str, Field(min_length=1, max_length=MAX_TOOL_NAME)]


def _refuse(name: str) -> str:
    raise ValueError(f"{name[:MAX_NAME_LENGTH]!r} is not supported")


class UnknownKind(BaseModel):
    """An object of a type that is not served; reading it says so."""

    model_config = EXACT

    type: Annotated[str, AfterValidator(_refuse)]

    @classmethod
    def __get_pydantic_json_schema__(
        cls, _: core_schema.CoreSchema, __: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"title": cls.__name__, "not": {}}


class UnknownRole(BaseModel):
    """A turn of a role that is not known; reading it says so."""

    model_config = EXACT

    role: Annotated[str, AfterValidator(_refuse)]

    @classmethod
    def __get_pydantic_json_schema__(
        cls, _: core_schema.CoreSchema, __: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"title": cls.__name__, "not": {}}


def by_type(
    tags: Mapping[str, str],
    *,
    field: str = "type",
    default: str = "",
    others: str = "unknown",
    text: str = "",
) -> Discriminator:
    """Returns what chooses among models by an object's `field`: the tag that `tags` has for it,
    `default` being what objects without the field have, or the tag `others`. A text has the tag
    `text`, if there is one."""

    def tag_of(value: Any) -> str:
        if text and isinstance(value, str):
            return text
        kind = value.get(field) if isinstance(value, dict) else None
        kind = default if kind is None else kind
        return tags.get(kind, others) if isinstance(kind, str) else others

    return Discriminator(tag_of)


TEXT_OR_LIST = Discriminator(lambda value: "list" if isinstance(value, list) else "text")
"""Chooses between the tags `text` and `list`."""


def _check_items(value: object) -> object:
    """Bounds it before validation, which would make an error for each of a million items."""
    if isinstance(value, dict) and len(value) > MAX_METADATA:
        raise ValueError(f"has {len(value)} items; at most {MAX_METADATA} may be")
    return value


Metadata = Annotated[
    dict[str, Annotated[str, Field(max_length=512)]] | None,
    BeforeValidator(_check_items),
    Field(json_schema_extra={"maxProperties": MAX_METADATA}),
]
"""Labels that the client gives its request, which come back with the answer."""


class ConversationBody(BaseModel, ABC):
    """The fields that such bodies have in common, and what they stand for."""

    model_config = EXACT

    spelling: ClassVar[Mapping[str, str]]
    """Names of fields here, by the names that the rules of all requests have for them."""

    model: str | None = None

    @abstractmethod
    def to_conversation(self) -> Conversation:
        """Returns the conversation to continue.

        Raises:
            InvalidRequest: its turns contradict each other.
        """

    @contextmanager
    def in_own_words(self) -> Iterator[None]:
        """Spells the fields of errors as clients of this protocol do."""
        try:
            yield
        except errors.InvalidRequest as error:
            field = self._spelled(error.field)
            if field == error.field:
                raise
            raise type(error)(field, error.message.removeprefix(f"{error.field}: ")) from error

    @property
    @abstractmethod
    def _tool_places(self) -> Sequence[int]:
        """The places in `tools` of those that the model is told of."""

    def _spelled(self, field: str) -> str:
        match field.split("."):
            case ["tools", number, "function", name]:
                place = self._tool_places[int(number)]
                return f"tools.{place}.{self.spelling.get(name, name)}"
            case [first, *rest]:
                return ".".join([self.spelling.get(first, first), *rest])
        return field


class GeneratingBody(ConversationBody):
    """The fields of a body that asks for an answer."""

    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None

    @property
    @abstractmethod
    def grammar(self) -> str:
        """The grammar of the format that is asked for, or nothing."""

    @abstractmethod
    def options(self, sampling: SamplingParams) -> GenerationOptions:
        """Returns how to continue, with these options of sampling."""

    @abstractmethod
    def reply(self, generation: Generation) -> Reply:
        """Returns what writes the answer down."""

    @staticmethod
    @abstractmethod
    def explain(error: errors.OrcinusError) -> Event:
        """Returns the event of an error that comes before there is an answer."""

    def to_request(self) -> GenerationRequest:
        """Returns the request in the words that all protocols share.

        Raises:
            InvalidRequest: the turns contradict each other, or the format cannot be.
        """
        given = {
            name: value
            for name in ("temperature", "top_p", "top_k", "seed")
            if (value := getattr(self, name)) is not None
        }
        options = self.options(SamplingParams(**given, grammar=self.grammar))
        options = replace(options, defaulted=OPTIONS.keys() - given.keys())
        return GenerationRequest(
            prompts=(self.to_conversation(),), options=options, model=self.model or ""
        )


def json_text(value: Mapping[str, Any] | None) -> str:
    """Returns an object as JSON text, or nothing."""
    return "" if value is None else pydantic_core.to_json(value).decode()
