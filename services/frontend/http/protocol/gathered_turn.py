"""Joins the items that are parts of one turn of the assistant. Clients of some protocols send each
part of a turn back as a separate item."""

from collections.abc import Iterator

from services.frontend.request.conversation import ChatMessage, EarlierCall


class GatheredTurn:
    """The reasoning, the texts and the calls of a turn of the assistant, each in the order of
    arrival."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.texts: list[str] = []
        self.calls: list[EarlierCall] = []

    def to_message(self) -> ChatMessage:
        """Returns the turn in the form that chat templates read. Texts are joined by line ends to
        one text, and so are parts of reasoning."""
        return ChatMessage(
            "assistant",
            "\n".join(self.texts) if self.texts else None,
            tool_calls=tuple(self.calls),
            reasoning_content="\n".join(self.reasoning) or None,
        )

    def begin(self) -> Iterator[ChatMessage]:
        """Prepares for adding reasoning or text. If the turn already has text or calls, only calls
        may follow in it. So the turn is yielded, and a new turn begins."""
        if self.texts or self.calls:
            yield from self.end()

    def end(self) -> Iterator[ChatMessage]:
        """Ends the turn and yields it, unless it is empty. Parts that are added later belong to the
        next turn."""
        if self.reasoning or self.texts or self.calls:
            yield self.to_message()
        self.reasoning, self.texts, self.calls = [], [], []
