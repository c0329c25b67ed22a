"""Sends the pieces of answers as events as soon as the tokens arrive."""

from collections.abc import Callable, Iterable

from services.frontend.generation.answer import Piece
from services.frontend.http.transport.chunk_writer import ChunkWriter
from services.frontend.http.transport.event_output import EventOutput
from services.frontend.http.transport.event_stream import Event

ToEvents = Callable[[Piece], Iterable[Event]]
"""Type of a function that returns the events for a piece of an answer."""

ToTextEvent = Callable[[int, str], Event | None]
"""Type of a function that returns the event for new text of an answer. The event is empty if
nothing is to be sent yet. The result is None if one event may not suffice."""


class EventOutlet:
    """Writes the pieces of a generation as events, directly to the connection."""

    __slots__ = ("_chunks", "_flow", "_to_events", "_to_text_event")

    def __init__(
        self, chunks: ChunkWriter, to_events: ToEvents, to_text_event: ToTextEvent
    ) -> None:
        self._chunks = chunks
        self._flow = chunks.flow
        self._to_events = to_events
        self._to_text_event = to_text_event

    @classmethod
    def of(
        cls, output: EventOutput, to_events: ToEvents, to_text_event: ToTextEvent
    ) -> "EventOutlet | None":
        """Returns an outlet that writes to an output whose headers have been sent. Returns None if
        the output has no chunk writer."""
        return None if output.chunks is None else cls(output.chunks, to_events, to_text_event)

    @property
    def is_ready(self) -> bool:
        """Whether the client reads fast enough for more to be written."""
        return not self._flow.write_paused

    def take(self, piece: Piece) -> None:
        """Sends the events of a piece."""
        for event in self._to_events(piece):
            self._chunks.write(event)

    def take_text(self, index: int, text: str) -> None:
        """Sends the events for new text of the answer `index`."""
        event = self._to_text_event(index, text)
        if event is None:
            self.take(Piece(index, text))
        elif event:
            self._chunks.write(event)
