"""A conversation that a model continues, whichever protocol it came by.

Turns and tools are OpenAI's in meaning; other protocols are translated into them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from sys import getsizeof
from typing import Any, Literal

TURN_BYTES = 256
"""Bytes that a turn of a conversation, a call or a tool takes besides its texts."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool by the assistant."""

    id: str
    name: str
    arguments: str
    """A JSON object, as text."""

    @property
    def n_characters(self) -> int:
        """The number of characters that came from the client, and one more."""
        return 1 + len(self.id) + len(self.name) + len(self.arguments)

    @property
    def n_bytes(self) -> int:
        """About how many bytes of memory the call takes."""
        return TURN_BYTES + getsizeof(self.id) + getsizeof(self.name) + getsizeof(self.arguments)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str | None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """The call that a tool's message answers."""
    reasoning_content: str | None = None
    """What the assistant thought before it spoke."""

    @property
    def n_characters(self) -> int:
        """The number of characters that came from the client, and one more, since many turns
        without any are work too."""
        texts = (self.role, self.content, self.name, self.tool_call_id, self.reasoning_content)
        of_calls = sum(call.n_characters for call in self.tool_calls)
        return 1 + sum(len(text or "") for text in texts) + of_calls

    @property
    def n_bytes(self) -> int:
        """About how many bytes of memory the turn takes."""
        texts = (self.role, self.content, self.name, self.tool_call_id, self.reasoning_content)
        of_calls = sum(call.n_bytes for call in self.tool_calls)
        return TURN_BYTES + sum(map(getsizeof, texts)) + of_calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: str = ""
    """JSON schema of its arguments, as JSON text; empty for any object."""
    is_strict: bool = False
    """Whether arguments must keep the schema even where the model chooses to call."""

    @property
    def n_characters(self) -> int:
        """The number of characters that came from the client, and one more."""
        return 1 + len(self.name) + len(self.description) + len(self.parameters)

    @property
    def n_bytes(self) -> int:
        """About how many bytes of memory the tool takes."""
        texts = (self.name, self.description, self.parameters)
        return TURN_BYTES + sum(map(getsizeof, texts))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Whether the model calls tools, and which."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str = ""
    """The tool to call, with mode `named`."""
    allows_parallel: bool = True


@dataclass(frozen=True, slots=True)
class Conversation:
    """The turns of a conversation, oldest first; the chat template makes a text of them."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables that the client sets for the chat template, such as `enable_thinking`; JSON."""
