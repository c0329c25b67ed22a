"""Tools that clients run. The model sees these tools.

Some protocols also have tools that OpenAI's or Anthropic's own servers run. Such tools do not run
here, and the model does not see them.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Protocol

import pydantic_core
from pydantic import BaseModel, Field

from services.common import errors
from services.frontend.http.bodies.object_kinds import ExactModel
from services.frontend.request.conversation import Tool

MAX_TOOL_NAME = 128
"""Largest number of characters in a tool's name."""

ToolName = Annotated[str, Field(min_length=1, max_length=MAX_TOOL_NAME)]


class ClientTool(ExactModel, ABC):
    """A tool that the client runs."""

    @abstractmethod
    def to_tool(self) -> Tool:
        """Returns the tool in the form that all protocols share."""


class DescribedFunction(Protocol):
    """A function in the body of any protocol, with the fields whose names are equal in all
    protocols."""

    name: str
    description: str | None
    strict: bool | None


def tool_of(function: DescribedFunction, *, parameters: str) -> Tool:
    """Converts a function to a tool. `parameters` is the JSON schema of the arguments, or empty if
    there is no schema."""
    return Tool(
        name=function.name,
        description=function.description or "",
        parameters=parameters,
        is_strict=bool(function.strict),
    )


def shown_tools(
    tools: Sequence[BaseModel] | None, *, field: str = "tools"
) -> dict[str, ClientTool]:
    """Returns the tools of a body that the model sees, keyed by their path in the body, such as
    `tools.0`. `field` is the path of the list."""
    places = enumerate(tools or ())
    return {f"{field}.{place}": tool for place, tool in places if isinstance(tool, ClientTool)}


def json_text(value: Mapping[str, Any] | None) -> str:
    """Returns an object as JSON text. Returns an empty text for None."""
    return "" if value is None else pydantic_core.to_json(value).decode()


def check_allowed(names: set[str], tools: Iterable[str]) -> None:
    """Raises InvalidRequest if one of `names`, the tools that a `tool_choice` allows, is not the
    name of one of the tools."""
    if unknown := names.difference(tools):
        raise errors.InvalidRequest(
            "tool_choice", f"{errors.shortened(min(unknown))!r} is none of the tools"
        )
