"""Pieces of answers that leave as events as soon as their tokens come."""

from collections.abc import Callable, Iterable

from services.frontend.generation.answer import Piece
from services.frontend.http.event_output import EventOutput
from services.frontend.http.exchange import Event, framed


class EventOutlet:
    """The outlet of a stream; `to_events` makes events of a piece."""

    def __init__(self, output: EventOutput, to_events: Callable[[Piece], Iterable[Event]]) -> None:
        self._output = output
        self._to_events = to_events

    @property
    def is_ready(self) -> bool:
        """Whether the client keeps up."""
        return self._output.is_ready

    def take(self, piece: Piece) -> None:
        """Sends the events of a piece."""
        for event in self._to_events(piece):
            self._output.write_now(framed(event))
