"""A reader of messages for tests: a model that marks its words with single characters.

§ begins reasoning, ¶ begins content, «NAME» begins a call, whose arguments follow
"""

from services.frontend.text.message_reader import CallDelta, MessageDelta, Part, Words


class TaggedReader:
    """Reads a text in which calls are tags. A tag that is not complete is held back."""

    ends_in_call = False

    def __init__(self) -> None:
        self.n_tool_calls = 0
        self._mode = "¶"
        self._name = ""
        self._n_read = 0

    def leave_out(self, n_characters: int) -> None:
        """Counts characters that the reader does not get."""
        self._n_read += n_characters

    def feed(self, text: str) -> MessageDelta:
        """Takes new text and returns what it adds to the message."""
        parts = list[Part]()
        for character in text:
            self._n_read += 1
            if character in "§¶«":
                self._mode, self._name = character, ""
            elif character == "»":
                self._mode = character
                index, self.n_tool_calls = self.n_tool_calls, self.n_tool_calls + 1
                parts.append(CallDelta(index=index, id=f"call_{index}", name=self._name))
            elif self._mode == "«":
                self._name += character
            elif self._mode == "»":
                parts.append(CallDelta(index=self.n_tool_calls - 1, arguments=character))
            else:
                parts.append(Words(character, self._mode == "§", self._n_read))
        return MessageDelta(tuple(parts))

    def flush(self) -> MessageDelta:
        """Returns nothing."""
        return MessageDelta()
