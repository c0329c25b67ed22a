"""The answer to a conversation in a protocol of its own: whole, or as named events."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from services.common import errors
from services.frontend.generation.answer import Piece
from services.frontend.generation.generation import Generation
from services.frontend.http.openai.reply import Json, to_json
from services.frontend.http.protocol.message_items import MessageItems, Step
from services.frontend.http.transport.event_stream import Event, framed
from services.frontend.request.finish_reason import FinishReason


class Reply(ABC):
    """Writes down the one answer of a generation."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._items = MessageItems(generation.message_reader(0))

    def events(self, piece: Piece) -> Iterator[Event]:
        """Yields the events for a new piece of the answer."""
        for step in self._items.feed(piece):
            yield from self._step(step)
        if piece.finish_reason is not None:
            yield from self._end(piece.finish_reason)

    @abstractmethod
    def whole(self, piece: Piece) -> Json:
        """Returns the complete answer, made of one whole piece."""

    @abstractmethod
    def begin(self) -> Iterator[Event]:
        """Yields the events with which a stream begins."""

    @abstractmethod
    def explain(self, error: errors.OrcinusError) -> Event:
        """Returns the event with which a stream that fails ends."""

    @abstractmethod
    def _step(self, step: Step) -> Iterator[Event]: ...

    @abstractmethod
    def _end(self, reason: FinishReason) -> Iterator[Event]: ...


def named_event(name: str, fields: Json) -> Event:
    """Returns an event whose data has its name as type, too."""
    return framed(to_json({"type": name, **fields}), name=name.encode())
