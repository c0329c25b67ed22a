"""A reader of messages for tests: a model that marks its words with single characters.

§ begins reasoning, ¶ begins content, «NAME» begins a call, whose arguments follow
"""

from services.frontend.text.message_reader import MessageDelta, ToolCallDelta


class TaggedReader:
    """Reads such a text; a name that is not complete is held back."""

    def __init__(self) -> None:
        self.n_tool_calls = 0
        self._mode = "¶"
        self._name = ""

    def feed(self, text: str) -> MessageDelta:
        """Takes new text and returns what it adds to the message."""
        reasoning, content, calls = "", "", list[ToolCallDelta]()
        for character in text:
            if character in "§¶«":
                self._mode, self._name = character, ""
            elif character == "»":
                self._mode = character
                index, self.n_tool_calls = self.n_tool_calls, self.n_tool_calls + 1
                calls.append(ToolCallDelta(index=index, id=f"call_{index}", name=self._name))
            elif self._mode == "«":
                self._name += character
            elif self._mode == "»":
                calls.append(ToolCallDelta(index=self.n_tool_calls - 1, arguments=character))
            elif self._mode == "§":
                reasoning += character
            else:
                content += character
        return MessageDelta(reasoning=reasoning, content=content, tool_calls=tuple(calls))

    def flush(self) -> MessageDelta:
        """Returns nothing."""
        return MessageDelta()
