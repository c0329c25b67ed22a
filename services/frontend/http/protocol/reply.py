"""Base class of the replies to requests for generated answers. A reply is whole, or a stream of
events."""

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
    """Names of the fields and keywords of JSON schemas that are not enforced, as the protocol
    spells them."""

    @abstractmethod
    def whole(self, pieces: Sequence[Piece]) -> Iterator[bytes]:
        """Yields the whole reply as parts of its JSON. `pieces` has one piece for each answer."""

    def begin(self) -> Iterable[Event]:
        """Returns the events with which a stream begins."""
        return ()

    @abstractmethod
    def events(self, piece: Piece) -> Iterable[Event]:
        """Returns the events for a new piece of an answer."""

    def text_event(self, index: int, text: str) -> Event | None:
        """Returns the event for new text of the answer `index`, or an empty event if nothing is to
        be sent yet. Returns None if one event may not suffice; the caller then calls `events`
        instead."""
        return None

    @abstractmethod
    def end(self) -> Iterable[Event]:
        """Returns the events with which a stream ends after the last piece."""

    @abstractmethod
    def explain(self, error: errors.OrcinusError) -> Event:
        """Returns the event that reports an error and ends a failed stream."""


def named_event(name: str, fields: Mapping[str, object]) -> Event:
    """Returns an event with the name `name`. The data of the event repeats the name as `type`."""
    return framed(to_json({"type": name, **fields}), name=name.encode())
