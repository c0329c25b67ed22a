"""What a reader makes of an answer, for the tests of formats."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from services.frontend.request.conversation import Tool
from services.frontend.text.formats.call_reader import CallRules
from services.frontend.text.formats.registry import TOOL_FORMATS
from services.frontend.text.message_reader import MessageDelta

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "what": {"type": "string", "description": "A thing."},
        "n": {"type": "integer", "description": "A number."},
        "deep": {"type": "boolean", "description": "A depth."},
        "tags": {"type": "array", "items": {"type": "string"}, "description": "Tags."},
        "near": {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "A place."},
    },
    "required": ["what"],
    "additionalProperties": False,
}

FIND = Tool(name="find", description="Finds.", parameters=json.dumps(SCHEMA))
DIVE = Tool(name="dive", description="Dives.", parameters='{"type": "object", "properties": {}}')
TOOLS = (FIND, DIVE)


@dataclass
class Said:
    """A message, built from the deltas so far."""

    content: str = ""
    calls: list[list[str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    def add(self, delta: MessageDelta) -> None:
        """Adds a delta, as a client does."""
        self.content += delta.content
        for call in delta.tool_calls:
            if call.id:
                assert call.index == len(self.calls)
                self.calls.append([call.name, ""])
                self.ids.append(call.id)
            self.calls[call.index][1] += call.arguments


def rules(**more: Any) -> CallRules:
    """Returns the rules of an answer to a request with the tools."""
    return CallRules(
        new_id="id-{}".format,
        tools={tool.name: tool.parameters for tool in TOOLS},
        **more,
    )


def read(parser: str, pieces: Iterable[str], **more: Any) -> Said:
    """Returns the message that a reader makes of an answer that arrives in pieces."""
    reader, said = TOOL_FORMATS[parser].reader(rules(**more)), Said()
    for piece in pieces:
        said.add(reader.feed(piece))
    said.add(reader.flush())
    assert reader.n_tool_calls == len(said.calls)
    return said
