"""The assistant's turn, gathered from the parts in which clients send it back."""

from collections.abc import Iterator

from services.frontend.request.conversation import ChatMessage, EarlierCall


class GatheredTurn:
    """The reasoning, the texts and the calls of a turn, each in the order in which they come."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.texts: list[str] = []
        self.calls: list[EarlierCall] = []

    def to_message(self) -> ChatMessage:
        """Returns the turn as templates want it; parts of one kind become lines of one text."""
        return ChatMessage(
            "assistant",
            "\n".join(self.texts) if self.texts else None,
            tool_calls=tuple(self.calls),
            reasoning_content="\n".join(self.reasoning) or None,
        )

    def begin(self) -> Iterator[ChatMessage]:
        """Yields the turn if it has text or calls, after which only calls may come."""
        if self.texts or self.calls:
            yield from self.end()

    def end(self) -> Iterator[ChatMessage]:
        """Yields the turn if it has anything, and begins the next turn."""
        if self.reasoning or self.texts or self.calls:
            yield self.to_message()
        self.reasoning, self.texts, self.calls = [], [], []
