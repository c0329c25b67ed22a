"""Base class of replies that write an answer as a list of items: reasoning, texts and calls of
tools."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence

from services.frontend.generation.answer import Piece
from services.frontend.generation.generation import Generation
from services.frontend.http.protocol.json_text import to_json
from services.frontend.http.protocol.message_items import Item, MessageItems, Step, whole_items
from services.frontend.http.protocol.orcinus_note import NoteFields, note_of
from services.frontend.http.protocol.reply import Reply
from services.frontend.http.transport.event_stream import Event
from services.frontend.request.finish_reason import FinishReason


class MessageReply(Reply):
    """Writes the only answer of a generation, as items one after the other."""

    __slots__ = ("_generation", "_items", "_last", "_reason")

    def __init__(self, generation: Generation, *, shows_reasoning: bool = True) -> None:
        self._generation = generation
        self._items = MessageItems(generation.message_reader(0), shows_reasoning=shows_reasoning)
        self._reason = FinishReason.STOP  # replaced when the answer ends
        self._last: Piece | None = None  # the piece that ended the answer

    def whole(self, pieces: Sequence[Piece]) -> Iterator[bytes]:
        (piece,) = pieces
        self._note_end(piece)
        yield to_json(self._message(whole_items(self._items, piece)))

    def events(self, piece: Piece) -> Iterator[Event]:
        self._note_end(piece)
        for step in self._items.feed(piece):
            yield from self._step(step)

    @abstractmethod
    def _message(self, items: Sequence[tuple[Item, str]]) -> Mapping[str, object]:
        """Returns the whole answer. Each item comes with its text or, if it is a call, with its
        arguments."""

    @abstractmethod
    def _step(self, step: Step) -> Iterable[Event]:
        """Returns the events of the stream for one step: an item begins, grows or ends."""

    @property
    def _note(self) -> NoteFields:
        """The fields `orcinus` and `receipt`, if the answer has them. Empty before the end of the
        answer."""
        if self._last is None:
            return {}
        note = note_of([self._last.schema_valid], self.unenforced)
        if self._last.receipt is not None:
            note["receipt"] = self._last.receipt
        return note

    def _note_end(self, piece: Piece) -> None:
        if piece.finish_reason is not None:
            self._reason = piece.finish_reason
            self._last = piece
