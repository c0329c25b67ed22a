"""Base class of the bodies of requests for generated answers, in all protocols."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
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
    """A body that asks for generated answers."""

    stream: bool | None = None
    """Whether to answer with a stream of events."""
    priority: Annotated[int | None, PRIORITY] = None
    """Priority of the request: requests with lower numbers begin earlier, as in vLLM. Numbers below
    0 are limited by the `min_priority` of the API key. The priority of each class of requests rises
    while requests of the class wait. The priority does not affect which tokens are generated, and
    does nothing if the scheduler's `order` is `fcfs`."""
    cache_salt: Annotated[str | None, SALT] = None
    """Salt of the prefix cache. Requests share the prefix cache only if both their salt and their
    API key are equal. So a client cannot find out from the time of an answer whether other clients
    have sent a prompt."""
    cache_prompt: bool | None = None
    """Whether to take tokens of the prompt from the prefix cache, and to leave the prompt in the
    cache for later requests. The prefix cache is not used for a request with `prompt_logprobs`."""

    receipt: bool | None = None
    """Whether each answer has a signed receipt, which says how the answer was made. Refused if the
    server makes no receipts."""

    @abstractmethod
    def to_request(self) -> GenerationRequest:
        """Returns the request in the form that all protocols share.

        Raises:
            InvalidRequest: fields contradict each other.
        """

    @abstractmethod
    def reply(self, generation: Generation) -> Reply:
        """Returns the reply, which writes the answers of a generation."""

    @staticmethod
    @abstractmethod
    def explain(error: errors.OrcinusError) -> Event:
        """Returns the event that reports an error, for a stream that fails before it has a
        `Reply`."""

    def resume_at(self, last_event_id: str | None) -> None:
        """Sets the position from which a broken stream is resumed. `last_event_id` is the id of the
        last event that the client has received, or None for a new stream. Protocols whose streams
        have no ids ignore the id.

        Raises:
            InvalidRequest: the id is malformed, or the body does not match the id.
        """

    @property
    def unenforced(self) -> Sequence[str]:
        """Names of the fields of the request that the server cannot enforce for any model."""
        return ()

    def spelled(self, field: str) -> str:
        """Returns the protocol's name for a field. `field` is the name in `GenerationRequest`,
        which all protocols share."""
        return field

    def in_own_words(self) -> AbstractContextManager[None]:
        """Returns a context manager that catches an InvalidRequest and raises it with the
        protocol's name for the wrong field."""
        return nullcontext()
