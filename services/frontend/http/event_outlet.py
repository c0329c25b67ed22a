"""Pieces of answers that leave as events as soon as their tokens come."""

from collections.abc import Callable, Iterable

from services.frontend.generation.answer import Piece
from services.frontend.http.chunk_writer import ChunkWriter
from services.frontend.http.event_output import EventOutput
from services.frontend.http.exchange import Event

ToEvents = Callable[[Piece], Iterable[Event]]
"""A function that makes events of a piece."""


class EventOutlet:
    """The outlet of a stream of events."""

    def __init__(self, chunks: ChunkWriter, to_events: ToEvents) -> None:
        self._chunks = chunks
        self._flow = chunks.flow
        self._to_events = to_events

    @classmethod
    def of(cls, output: EventOutput, to_events: ToEvents) -> "EventOutlet | None":
        """Returns the outlet of an output whose headers are out; None if it has none."""
        return None if output.chunks is None else cls(output.chunks, to_events)

    @property
    def is_ready(self) -> bool:
        """Whether the client keeps up."""
        return not self._flow.write_paused

    def take(self, piece: Piece) -> None:
        """Sends the events of a piece."""
        for event in self._to_events(piece):
            self._chunks.write(event)
