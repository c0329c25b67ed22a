"""What a client hears of a message that a reader reads."""

from collections.abc import Callable
from dataclasses import dataclass, field

from services.frontend.text.message_reader import MessageDelta, MessageReader, Words

Readers = Callable[[], MessageReader]


@dataclass
class Said:
    """A message, built from the deltas so far."""

    reasoning: str = ""
    content: str = ""
    calls: list[list[str]] = field(default_factory=list)
    is_cut: bool = False
    spoken: list[tuple[str, int, bool]] = field(default_factory=list, compare=False)
    """Each character of the content and of the reasoning, the number of characters of the answer up
    to its end, and whether it is reasoning."""

    def add(self, delta: MessageDelta) -> None:
        """Adds a delta, as a client does."""
        self.reasoning += delta.reasoning
        self.content += delta.content
        for call in delta.tool_calls:
            if call.id:
                assert call.index == len(self.calls)
                assert call.id == f"id-{call.index}" or call.id.startswith("functions.")
                self.calls.append([call.name, ""])
            else:
                assert call.name == ""
            self.calls[call.index][1] += call.arguments
        for part in delta.parts:
            if isinstance(part, Words):
                begin = part.end - len(part.text) + 1
                self.spoken += [
                    (one, at, part.is_reasoning) for at, one in enumerate(part.text, begin)
                ]


def read(readers: Readers, *pieces: str) -> Said:
    """Returns the message of a text that comes in pieces."""
    reader, said = readers(), Said()
    for piece in pieces:
        said.add(reader.feed(piece))
    said.add(reader.flush())
    assert reader.n_tool_calls == len(said.calls)
    said.is_cut = reader.ends_in_call
    text = "".join(pieces)
    for is_reasoning in (False, True):
        spoken = [(one, at) for one, at, kind in said.spoken if kind is is_reasoning]
        assert spoken == sorted(spoken, key=lambda each: each[1]), text
    assert all(character == text[at - 1] for character, at, _ in said.spoken), text
    assert len({at for _, at, _ in said.spoken}) == len(said.spoken), text
    return said
