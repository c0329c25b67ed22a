"""The form in which a chat template takes the turns of a conversation and the tools."""

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import pydantic_core

from services.common import errors
from services.frontend.request.conversation import ChatMessage, EarlierCall, Tool

REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
"""Names under which chat templates look for the reasoning of a turn."""

SYSTEM_ROLES = ("system", "developer")

USUAL_ROLES = frozenset((*SYSTEM_ROLES, "user", "assistant", "tool"))
"""Roles for which the probes find out how the template takes messages. Each role is probed
separately."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateForm:
    """The form in which one chat template takes turns and tools. The defaults are the form that the
    `transformers` library passes and most templates take."""

    reasoning_names: tuple[str, ...] = REASONING_NAMES[:1]
    """Names under which the template gets the reasoning of a turn."""
    knows_developers: bool = False
    """Whether the template has a role `developer`. If not, messages of this role become system
    messages."""
    part_roles: frozenset[str] = frozenset()
    """Roles whose content the template takes as a list of parts instead of a text."""
    has_null_content: bool = True
    """Whether a turn that has calls but no content gets the content None instead of an empty
    text."""
    has_text_arguments: bool = False
    """Whether the template takes the arguments of a call as the text of a JSON object instead of a
    mapping."""
    has_late_systems: bool = True
    """Whether the template shows system messages that come after the first message. If not, all
    system messages are joined into one first message."""
    has_parallel_calls: bool = True
    """Whether the template shows several calls in a turn. If not, such a turn is split into turns
    of one call each, followed by the call's result."""
    has_reasoning_beside_content: bool = True
    """Whether the template takes both reasoning and content in a turn with calls. If not, the
    reasoning becomes the beginning of the content."""
    shows_content_beside_calls: bool = True
    """Whether the template shows the content of a turn of calls. If not, the content is left out of
    the prompt, as the `transformers` library does."""
    has_tools_without_description: bool = True
    """Whether the template takes tools without a description. If not, such tools get an empty
    description."""
    takes_tool_results: bool = True
    """Whether the template takes tools, and shows messages of the role `tool`."""
    left_out_roles: frozenset[str] = frozenset()
    """Roles whose messages the template would leave out without an error."""
    named_roles: frozenset[str] = frozenset()
    """Texts in quotes in the source of the template. The roles that the template knows are among
    them."""
    shows_any_role: bool = True
    """Whether the template shows messages of roles that it does not name. If not, such messages
    would be left out without an error."""

    @classmethod
    def of_source(cls, source: str) -> Self:
        """Returns the form of the template with this source code, as far as the source code shows
        it."""
        words = set(re.findall(r"\w+", source))
        names = tuple(name for name in REASONING_NAMES if name in words)
        return cls(
            reasoning_names=names or REASONING_NAMES[:1],
            knows_developers="developer" in source,
            named_roles=frozenset(re.findall(r"""['"](\w+)['"]""", source)),
        )

    def turns(
        self, messages: Sequence[ChatMessage], *, continues_last: bool = False
    ) -> list[dict[str, Any]]:
        """Returns the turns of a conversation as the template takes them. Missing fields are left
        out. With `continues_last`, the last message is neither joined with others nor split, so it
        stays the last one.

        Raises:
            InvalidRequest: the template would leave out a message.
        """
        for role in dict.fromkeys(self._role(one) for one in messages if one.content):
            if self._leaves_out(role):
                raise errors.InvalidRequest(
                    "messages",
                    "the model's chat template leaves out messages of the role "
                    f"{errors.shortened(role)!r}",
                )
        at = len(messages) - (1 if continues_last else 0)
        adapted = messages[:at]
        if not self.has_late_systems:
            adapted = _with_one_system(adapted)
        if not self.has_parallel_calls:
            adapted = _with_single_calls(adapted)
        return [self._turn(message) for message in (*adapted, *messages[at:])]

    def left_out(self, messages: Sequence[ChatMessage]) -> tuple[str, ...]:
        """Returns the names of fields whose values the template leaves out of the prompt. Messages
        that the template would leave out entirely are not named: `turns` raises an error for
        them."""
        has_both = any(one.tool_calls and one.content for one in messages)
        return ("messages.content",) if has_both and not self.shows_content_beside_calls else ()

    def tool(self, tool: Tool) -> dict[str, Any]:
        """Returns a tool as a mapping in the form of OpenAI's API."""
        function: dict[str, Any] = {"name": tool.name}
        if tool.description or not self.has_tools_without_description:
            function["description"] = tool.description
        if tool.parameters:
            function["parameters"] = _read(tool.parameters, {})
        if tool.is_strict:
            function["strict"] = True
        return {"type": "function", "function": function}

    def _leaves_out(self, role: str) -> bool:
        """Returns whether the template would leave out messages of a role without an error."""
        if role in USUAL_ROLES:
            return role in self.left_out_roles
        first_word = role.split(" ")[0]  # some templates take roles such as `document 1`
        return not self.shows_any_role and first_word not in self.named_roles

    def _role(self, message: ChatMessage) -> str:
        is_system = message.role == "developer" and not self.knows_developers
        return "system" if is_system else message.role

    def _turn(self, message: ChatMessage) -> dict[str, Any]:
        if message.tool_calls and message.content and not self.has_reasoning_beside_content:
            texts = filter(None, (message.reasoning_content, message.content))
            message = replace(message, content="\n\n".join(texts), reasoning_content=None)
        role = self._role(message)
        turn: dict[str, Any] = {"role": role, "content": self._content(role, message)}
        given = {"name": message.name, "tool_call_id": message.tool_call_id}
        given |= dict.fromkeys(self.reasoning_names, message.reasoning_content)
        turn |= {name: value for name, value in given.items() if value is not None}
        if message.tool_calls:
            turn["tool_calls"] = [self._call(call) for call in message.tool_calls]
        return turn

    def _content(self, role: str, message: ChatMessage) -> object:
        if message.content is None and message.tool_calls and self.has_null_content:
            return None
        content = message.content or ""
        return [{"type": "text", "text": content}] if role in self.part_roles else content

    def _call(self, call: EarlierCall) -> dict[str, Any]:
        """Returns a call as the template takes it. Arguments that are not a JSON object stay a
        text."""
        text = call.arguments
        arguments = text if self.has_text_arguments else _read(text, text)
        function = {"name": call.name, "arguments": arguments}
        return {"id": call.id, "type": "function", "function": function}


def _with_one_system(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Returns messages in which all system messages are joined into the first message, with blank
    lines between them."""
    systems = [message for message in messages if message.role in SYSTEM_ROLES]
    rest = [message for message in messages if message.role not in SYSTEM_ROLES]
    if not systems:
        return rest
    texts = [message.content for message in systems if message.content]
    return [replace(systems[0], content="\n\n".join(texts)), *rest]


def _with_single_calls(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Returns messages in which each turn has at most one call, followed by the call's result."""
    rest, found = deque(messages), list[ChatMessage]()
    while rest:
        message = rest.popleft()
        if len(message.tool_calls) < 2:
            found.append(message)
            continue
        results = []
        while rest and rest[0].role == "tool":
            results.append(rest.popleft())
        for call in message.tool_calls:
            found.append(replace(message, tool_calls=(call,)))
            found += [result for result in results if result.tool_call_id == call.id]
            results = [result for result in results if result.tool_call_id != call.id]
            message = replace(message, content=None, reasoning_content=None)
        found += results
    return found


def _read(text: str, otherwise: object) -> object:
    """Parses a text as a JSON object and returns the object. Returns `otherwise` if the text is not
    a JSON object."""
    try:
        value = pydantic_core.from_json(text.encode())
    except ValueError:
        return otherwise
    return value if isinstance(value, dict) else otherwise
