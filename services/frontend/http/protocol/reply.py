"""Base class of the replies to requests that generate. A reply is whole, or a stream of events."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence

from services.common import errors
from services.frontend.generation.answer import Piece
from services.frontend.http.protocol.json_text import to_json
from services.frontend.http.transport.event_stream import Event, framed


class Reply(ABC):
    """Writes the answers of one generation in the form of a protocol."""

    __slots__ = ("unenforced",)

    unenforced: Sequence[str]
    """Keywords of JSON schemas that are not enforced, as the protocol spells their fields."""

    @abstractmethod
    def whole(self, pieces: Sequence[Piece]) -> Iterator[bytes]:
        """Yields the parts of the whole reply in JSON. There is one piece for each answer."""

    def begin(self) -> Iterable[Event]:
        """Returns the events with which a stream begins."""
        return ()

    @abstractmethod
    def events(self, piece: Piece) -> Iterable[Event]:
        """Returns the events for a new piece of an answer."""

    def text_event(self, index: int, text: str) -> Event | None:
        """Returns the event for new text of the answer `index`. The event is empty if the text
        needs none yet. Returns None if the text may need several events or other ones, which
        `events` then returns."""
        return None

    @abstractmethod
    def end(self) -> Iterable[Event]:
        """Returns the events with which a stream ends after the last piece."""

    @abstractmethod
    def explain(self, error: errors.OrcinusError) -> Event:
        """Returns the event of an error, with which a failed stream ends."""


def named_event(name: str, fields: Mapping[str, object]) -> Event:
    """Returns an event whose data repeats the name of the event as `type`."""
    return framed(to_json({"type": name, **fields}), name=name.encode())
