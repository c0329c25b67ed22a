"""Splits an assistant's message into items: reasoning, texts and calls of tools.

    Piece → MessageReader → MessageItems → Step → the events of a protocol

Some protocols write reasoning, text and each call of a tool as separate items, one after the other.
White space between two items is left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from services.frontend.generation.answer import Piece
from services.frontend.request.finish_reason import FinishReason
from services.frontend.text.message_reader import CallDelta, MessageDelta, MessageReader, Words


class ItemKind(Enum):
    """The kind of an item of a message."""

    REASONING = auto()
    TEXT = auto()
    CALL = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """An item of an assistant's message: reasoning, a text, or a call of a tool. A call also has an
    id and the name of the tool."""

    index: int
    kind: ItemKind
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Began:
    """A step: a new item has begun. The item is still empty."""

    item: Item


@dataclass(frozen=True, slots=True)
class Grew:
    """A step: an item has grown by `text`. If the item is a call, `text` is a part of the
    arguments. Otherwise `words` is the text with its position in the answer."""

    item: Item
    text: str
    words: Words | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """A step: an item has ended. If it is the last item of the answer, `reason` says why the answer
    ended. `is_cut` says whether the item is a call whose arguments are incomplete."""

    item: Item
    reason: FinishReason | None = None
    is_cut: bool = False


Step = Began | Grew | Ended


class MessageItems:
    """Turns the pieces of one answer into steps: items that begin, grow and end. An answer has at
    least one item."""

    def __init__(self, reader: MessageReader, *, shows_reasoning: bool = True) -> None:
        """If `shows_reasoning` is false, the reasoning of the model makes no items."""
        self._reader = reader
        self._shows_reasoning = shows_reasoning
        self._n_items = 0
        self._open: Item | None = None
        self._call_index = -1
        self._spaces: list[Words] = []
        """White space that may become the beginning of an item of the kind `_space_kind`. If the
        next item is of another kind, the white space is dropped."""
        self._space_kind = ItemKind.TEXT

    @property
    def has_calls(self) -> bool:
        """Whether a call of a tool has begun."""
        return self._reader.n_tool_calls > 0

    @property
    def ends_in_call(self) -> bool:
        """Whether the answer ends inside the arguments of a call."""
        return self._reader.ends_in_call

    def feed(self, piece: Piece) -> Iterator[Step]:
        """Reads a piece of the answer, and yields the steps that the piece causes."""
        yield from self._add(self._reader.feed(piece.text))
        if piece.finish_reason is not None:
            yield from self._add(self._reader.flush())
            if not self._n_items:
                if self._space_kind is not ItemKind.TEXT:
                    self._spaces.clear()
                yield from self._begin(ItemKind.TEXT)
            yield from self._end(piece.finish_reason)

    def _add(self, delta: MessageDelta) -> Iterator[Step]:
        for part in delta.parts:
            if isinstance(part, CallDelta):
                yield from self._call(part)
            elif not part.is_reasoning:
                yield from self._grow(ItemKind.TEXT, part)
            elif self._shows_reasoning:
                yield from self._grow(ItemKind.REASONING, part)

    def _call(self, call: CallDelta) -> Iterator[Step]:
        if call.index != self._call_index or self._open is None:
            self._call_index = call.index
            self._spaces.clear()
            yield from self._begin(ItemKind.CALL, call_id=call.id, name=call.name)
        if call.arguments and self._open is not None:
            yield Grew(self._open, call.arguments)

    def _grow(self, kind: ItemKind, words: Words) -> Iterator[Step]:
        if self._open is None or self._open.kind is not kind:
            if kind is not self._space_kind:
                self._spaces.clear()
                self._space_kind = kind
            if words.text.isspace():
                self._spaces.append(words)
                return
            yield from self._begin(kind)
        if self._open is not None:
            yield Grew(self._open, words.text, words)

    def _begin(self, kind: ItemKind, *, call_id: str = "", name: str = "") -> Iterator[Step]:
        yield from self._end()
        self._open = Item(index=self._n_items, kind=kind, call_id=call_id, name=name)
        self._n_items += 1
        yield Began(self._open)
        for words in self._spaces:
            yield Grew(self._open, words.text, words)
        self._spaces.clear()

    def _end(self, reason: FinishReason | None = None) -> Iterator[Step]:
        if self._open is not None:
            yield Ended(self._open, reason, is_cut=reason is not None and self.ends_in_call)
            self._open = None


def whole_items(items: MessageItems, piece: Piece) -> list[tuple[Item, str]]:
    """Returns the items of a whole answer. Each item comes with its whole text or, if it is a call,
    with its whole arguments."""
    texts: dict[Item, list[str]] = {}
    for step in items.feed(piece):
        parts = texts.setdefault(step.item, [])
        if isinstance(step, Grew):
            parts.append(step.text)
    return [(item, "".join(parts)) for item, parts in texts.items()]
