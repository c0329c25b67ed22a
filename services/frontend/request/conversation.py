"""A conversation that a model continues, independent of the client's protocol.

Turns and tools have the meaning that OpenAI's API gives them. Turns and tools of other protocols
are translated to this form.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from sys import getsizeof
from typing import Any, Literal

import pydantic_core

from services.common import errors

TURN_BYTES = 256
"""Bytes of memory that a turn of a conversation takes besides its texts. A tool and a call of a
tool are counted with the same number."""

JSON_BYTES = 32
"""Largest number of bytes of memory that parsed JSON takes for each character of its text. Nested
lists take the most memory."""

MAX_TURNS = 2048
"""Largest number of messages of a conversation, and of parts of a message. The number is limited
because each message or part takes more memory than its text."""

MAX_TOOLS = 512
"""Largest number of tools in a request. The OpenAI API allows a fourth of this number, but agents
with many servers of tools send hundreds of tools."""

MAX_TOOL_NAME = 256
"""Largest number of characters in a tool's name."""

MAX_TEMPLATE_KWARGS = 16 * 2**10
"""Largest size of a client's variables for the chat template, in bytes of JSON."""

RESERVED_KWARGS = {"messages", "tools", "add_generation_prompt"}
"""Variables of the chat template that clients cannot set directly, because other fields of the body
set them."""


@dataclass(frozen=True, slots=True)
class EarlierCall:
    """A call of a tool by the assistant in an earlier turn of the conversation."""

    id: str
    name: str
    arguments: str
    """Arguments of the call, as the text of a JSON object."""

    @property
    def n_characters(self) -> int:
        """Number of characters of the call's texts that came from the client, plus one for the call
        itself."""
        return 1 + len(self.id) + len(self.name) + len(self.arguments)

    @property
    def n_bytes(self) -> int:
        """Approximate memory of the call, in bytes."""
        return TURN_BYTES + getsizeof(self.id) + getsizeof(self.name) + getsizeof(self.arguments)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str | None
    name: str | None = None
    tool_calls: tuple[EarlierCall, ...] = ()
    tool_call_id: str | None = None
    """Id of the call whose result this message is; set only in a tool's message."""
    reasoning_content: str | None = None
    """The reasoning of the assistant before its content."""

    @property
    def n_characters(self) -> int:
        """Number of characters of the turn's texts that came from the client, plus one for the turn
        itself."""
        texts = (self.role, self.content, self.name, self.tool_call_id, self.reasoning_content)
        of_calls = sum(call.n_characters for call in self.tool_calls)
        return 1 + sum(len(text or "") for text in texts) + of_calls

    @property
    def n_bytes(self) -> int:
        """Approximate memory of the turn, in bytes."""
        texts = (self.role, self.content, self.name, self.tool_call_id, self.reasoning_content)
        of_calls = sum(call.n_bytes for call in self.tool_calls)
        return TURN_BYTES + sum(map(getsizeof, texts)) + of_calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: str = ""
    """JSON schema of the arguments, as JSON text; empty if any object is allowed."""
    is_strict: bool = False
    """Whether arguments must match the schema even if the model may choose whether to call the
    tool. If so, a schema that cannot be enforced is an error."""
    is_held: bool = False
    """Whether arguments must match the enforceable part of the schema even if the model may choose
    whether to call the tool."""

    @property
    def n_characters(self) -> int:
        """Number of characters of the tool's texts that came from the client, plus one for the tool
        itself."""
        return 1 + len(self.name) + len(self.description) + len(self.parameters)

    @property
    def n_bytes(self) -> int:
        """Approximate memory of the tool, in bytes."""
        texts = (self.name, self.description, self.parameters)
        return TURN_BYTES + sum(map(getsizeof, texts))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Says whether the model may, must or must not call tools, and which tools it may call."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str = ""
    """Name of the tool that the model must call; set only with the mode `named`."""
    allows_parallel: bool = True


@dataclass(frozen=True, slots=True)
class Conversation:
    """The turns of a conversation, oldest first, and its tools. The chat template renders both as
    one text."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables that the client sets for the chat template, such as `enable_thinking`, as JSON
    values."""
    adds_generation_prompt: bool = True
    """Whether the answer is a new turn of the assistant after the last turn."""
    continues_last: bool = False
    """Whether the answer continues the last turn instead of beginning a new turn."""

    @property
    def n_characters(self) -> int:
        """Number of characters of all texts that came from the client, plus one for each turn, tool
        call and tool."""
        n_characters = sum(turn.n_characters for turn in self.messages)
        n_characters += sum(tool.n_characters for tool in self.tools)
        return n_characters + self._n_kwargs

    @property
    def n_bytes(self) -> int:
        """Approximate memory of the conversation, in bytes."""
        n_bytes = sum(turn.n_bytes for turn in self.messages)
        return n_bytes + sum(tool.n_bytes for tool in self.tools) + JSON_BYTES * self._n_kwargs

    @property
    def n_parts(self) -> int:
        """Number of turns, tool calls and tools."""
        n_calls = sum(len(turn.tool_calls) for turn in self.messages)
        return len(self.messages) + n_calls + len(self.tools)

    @property
    def n_json_characters(self) -> int:
        """Number of characters of the JSON texts that are parsed for the chat template: the
        parameters of tools, the arguments of calls, and `template_kwargs`."""
        n_characters = sum(len(tool.parameters) for tool in self.tools) + self._n_kwargs
        calls = (call for turn in self.messages for call in turn.tool_calls)
        return n_characters + sum(len(call.arguments) for call in calls)

    @property
    def _n_kwargs(self) -> int:
        return len(pydantic_core.to_json(self.template_kwargs)) if self.template_kwargs else 0

    def check(self) -> None:
        """Checks all rules that do not depend on the model.

        Raises:
            InvalidRequest: a rule is broken. The error names the field, as clients spell it.
        """
        if len(self.tools) > MAX_TOOLS:
            raise errors.InvalidRequest(
                "tools", f"has {len(self.tools)} tools; at most {MAX_TOOLS} may be"
            )
        for number, tool in enumerate(self.tools):
            if not 1 <= len(tool.name) <= MAX_TOOL_NAME:
                raise errors.InvalidRequest(
                    f"tools.{number}.function.name", f"must have 1 to {MAX_TOOL_NAME} characters"
                )
        self._check_choice()
        for name in RESERVED_KWARGS.intersection(self.template_kwargs):
            raise errors.InvalidRequest(f"chat_template_kwargs.{name}", "has a field of its own")
        if self._n_kwargs > MAX_TEMPLATE_KWARGS:
            raise errors.InvalidRequest(
                "chat_template_kwargs", f"must not have more than {MAX_TEMPLATE_KWARGS} bytes"
            )
        if self.continues_last and self.adds_generation_prompt:
            raise errors.InvalidRequest(
                "continue_final_message", "only with add_generation_prompt = false"
            )

    def _check_choice(self) -> None:
        choice = self.tool_choice
        if choice.mode in ("required", "named") and not self.tools:
            raise errors.InvalidRequest("tool_choice", "needs tools to choose from")
        if choice.mode == "named" and choice.name not in {tool.name for tool in self.tools}:
            raise errors.InvalidRequest(
                "tool_choice",
                f"{errors.shortened(choice.name)!r} is none of the tools",
            )
