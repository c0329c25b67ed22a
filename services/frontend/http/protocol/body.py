"""The body of a request that generates, in whichever protocol."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

from services.common import errors
from services.frontend.generation.generation import Generation
from services.frontend.http.bodies.object_kinds import ExactModel
from services.frontend.http.protocol.reply import Reply
from services.frontend.http.transport.event_stream import Event
from services.frontend.request.generation_request import GenerationRequest


class RequestBody(ExactModel, ABC):
    """A body that asks for a generation, and for the reply to it."""

    stream: bool | None = None

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
