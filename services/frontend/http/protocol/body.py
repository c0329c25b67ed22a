"""The body of a request that generates, in whichever protocol."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated

from services.common import errors
from services.frontend.generation.generation import Generation
from services.frontend.http.bodies.object_kinds import ExactModel
from services.frontend.http.bodies.ranges import PRIORITY, SALT
from services.frontend.http.protocol.reply import Reply
from services.frontend.http.transport.event_stream import Event
from services.frontend.request.generation_request import GenerationRequest


class RequestBody(ExactModel, ABC):
    """A body that asks for a generation, and for the reply to it."""

    stream: bool | None = None
    """Answer with events."""
    priority: Annotated[int | None, PRIORITY] = None
    """How early the request is begun: lower numbers come earlier, as in vLLM. Less than 0 only as
    far as the API key's `min_priority` allows. Each class of requests rises while it waits. It
    changes no token, and does nothing where the scheduler's `order` is `fcfs`."""
    cache_salt: Annotated[str | None, SALT] = None
    """Requests with the same salt and API key share what the prefix cache has of equal beginnings
    of prompts; others cannot tell from the time of an answer what was asked."""
    cache_prompt: bool | None = None
    """Use what the prefix cache has of the prompt, and leave it there for others; also off for a
    request with `prompt_logprobs`."""

    @abstractmethod
    def to_request(self) -> GenerationRequest:
        """Returns the request in the words that all protocols share.

        Raises:
            InvalidRequest: fields contradict each other.
        """

    @abstractmethod
    def reply(self, generation: Generation) -> Reply:
        """Returns what writes the answers of a generation down."""

    @staticmethod
    @abstractmethod
    def explain(error: errors.OrcinusError) -> Event:
        """Returns the only event of a stream that fails before there is a reply."""

    def resume_at(self, last_event_id: str | None) -> None:
        """Notes the id of the last event that the client has of a stream that broke. Protocols
        whose streams have no ids ignore it.

        Raises:
            InvalidRequest: the stream cannot go on there.
        """

    def in_own_words(self) -> AbstractContextManager[None]:
        """Spells the fields of errors as clients of the protocol do."""
        return nullcontext()
