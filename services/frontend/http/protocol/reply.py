"""The reply to a request that generates: whole, or as the events of a stream."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence

from services.common import errors
from services.frontend.generation.answer import Piece
from services.frontend.http.protocol.json_text import to_json
from services.frontend.http.transport.event_stream import Event, framed


class Reply(ABC):
    """Writes down the answers of one generation in the form of a protocol."""

    __slots__ = ()

    @abstractmethod
    def whole(self, pieces: Sequence[Piece]) -> Iterator[bytes]:
        """Yields the complete reply in JSON, part by part, made of one whole piece per answer."""

    def begin(self) -> Iterable[Event]:
        """Returns the events with which a stream begins."""
        return ()

    @abstractmethod
    def events(self, piece: Piece) -> Iterable[Event]:
        """Returns the events for a new piece of an answer."""

    def text_event(self, index: int, text: str) -> Event | None:
        """Returns the only event for new text of the answer `index`; None if the text may need
        other events, which `events` then returns."""
        return None

    @abstractmethod
    def end(self) -> Iterable[Event]:
        """Returns the events with which a stream ends after the last piece."""

    @abstractmethod
    def explain(self, error: errors.OrcinusError) -> Event:
        """Returns the event with which a stream that fails ends."""


def named_event(name: str, fields: Mapping[str, object]) -> Event:
    """Returns an event that has its name in its data, too, as `type`."""
    return framed(to_json({"type": name, **fields}), name=name.encode())
