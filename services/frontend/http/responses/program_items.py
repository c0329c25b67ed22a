"""Items of a conversation that are calls of programs, or results of such calls. The programs are
not functions of the client: shells, patches, interpreters, searches and servers of tools.

The model cannot call these programs, but it must see the earlier calls and their results. A call of
a program becomes a call of a tool with the name of the program, and the result of the program
becomes the result of this call.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pydantic_core
from pydantic import FailFast, Field, Tag
from typing_extensions import TypeAliasType

from services.frontend.http.bodies.object_kinds import ExactModel, by_type
from services.frontend.http.protocol.conversation_tools import ToolName
from services.frontend.request.conversation import MAX_TURNS

Objects = TypeAliasType(
    "Objects", Annotated[list[dict[str, Any]], FailFast(), Field(max_length=MAX_TURNS)]
)
Texts = TypeAliasType("Texts", Annotated[list[str], FailFast(), Field(max_length=MAX_TURNS)])


def _json(value: object) -> str:
    return pydantic_core.to_json(value).decode()


class LocalShellCallItem(ExactModel):
    """A command that the assistant ran in a shell of the client."""

    type: Literal["local_shell_call"]
    """Always `local_shell_call`."""
    call_id: str | None = None
    """Id of the call. The item with the call's result repeats the id."""
    id: str | None = None
    """Id of the item. A result of type `local_shell_call_output` repeats the id."""
    action: dict[str, Any]
    """The command."""


class ShellCallItem(ExactModel):
    """Commands that the assistant ran in a shell."""

    type: Literal["shell_call"]
    """Always `shell_call`."""
    call_id: str
    """Id of the call. The item with the call's result repeats the id."""
    action: dict[str, Any]
    """The commands."""


class ApplyPatchCallItem(ExactModel):
    """A change of a file by the assistant."""

    type: Literal["apply_patch_call"]
    """Always `apply_patch_call`."""
    call_id: str
    """Id of the call. The item with the call's result repeats the id."""
    operation: dict[str, Any]
    """The change."""


class LocalShellOutputItem(ExactModel):
    """The result of a command in a shell of the client."""

    type: Literal["local_shell_call_output"]
    """Always `local_shell_call_output`."""
    id: str
    """Id of the item with the call, or `call_id` of the call."""
    output: str
    """Result of the command, as a text."""


class ShellOutputItem(ExactModel):
    """The result of commands in a shell."""

    type: Literal["shell_call_output"]
    """Always `shell_call_output`."""
    call_id: str
    """Id of the call whose result this is. The call must be an earlier item."""
    output: Objects
    """Result of each command."""


class ApplyPatchOutputItem(ExactModel):
    """The result of a change of a file."""

    type: Literal["apply_patch_call_output"]
    """Always `apply_patch_call_output`."""
    call_id: str
    """Id of the call whose result this is. The call must be an earlier item."""
    status: str | None = None
    """State of the change. The model reads the state as the result if there is no `output`."""
    output: str | None = None
    """Result of the change."""


class McpCallItem(ExactModel):
    """A call of a tool of an MCP server, with the result."""

    type: Literal["mcp_call"]
    """Always `mcp_call`."""
    id: str
    """Id of the call."""
    name: ToolName
    """Name of the tool."""
    arguments: str
    """Arguments, as the text of a JSON object."""
    output: str | None = None
    """Result of the call."""
    error: Any = None
    """Reason why the call failed. The model reads the reason as the result if there is no
    `output`."""


class McpApprovalItem(ExactModel):
    """The user's answer to the question whether a tool of an MCP server may be called."""

    type: Literal["mcp_approval_response"]
    """Always `mcp_approval_response`."""
    reason: str | None = None
    """Reason that the user gives for the approval or the refusal. The model reads the reason as a
    message of the user."""


class CodeInterpreterItem(ExactModel):
    """A program that an interpreter ran, with the output of the program."""

    type: Literal["code_interpreter_call"]
    """Always `code_interpreter_call`."""
    id: str
    """Id of the call."""
    code: str | None = None
    """The program."""
    outputs: Objects | None = None
    """Outputs of the program. Only logs are read."""


class FileSearchItem(ExactModel):
    """A search in files, with the results."""

    type: Literal["file_search_call"]
    """Always `file_search_call`."""
    id: str
    """Id of the call."""
    queries: Texts | None = None
    """Search terms of each search."""
    results: Objects | None = None
    """Results of the searches."""


ProgramCall = LocalShellCallItem | ShellCallItem | ApplyPatchCallItem
"""An item with a call. The result of the call is a separate item."""

ProgramOutput = LocalShellOutputItem | ShellOutputItem | ApplyPatchOutputItem
"""An item with the result of a call. The call is a separate item."""

AnsweredCall = McpCallItem | CodeInterpreterItem | FileSearchItem
"""An item with a call and the result of the call."""

PROGRAM_TYPES = (
    "local_shell_call",
    "shell_call",
    "apply_patch_call",
    "local_shell_call_output",
    "shell_call_output",
    "apply_patch_call_output",
    "mcp_call",
    "mcp_approval_response",
    "code_interpreter_call",
    "file_search_call",
)

ProgramItem = Annotated[
    Annotated[LocalShellCallItem, Tag("local_shell_call")]
    | Annotated[ShellCallItem, Tag("shell_call")]
    | Annotated[ApplyPatchCallItem, Tag("apply_patch_call")]
    | Annotated[LocalShellOutputItem, Tag("local_shell_call_output")]
    | Annotated[ShellOutputItem, Tag("shell_call_output")]
    | Annotated[ApplyPatchOutputItem, Tag("apply_patch_call_output")]
    | Annotated[McpCallItem, Tag("mcp_call")]
    | Annotated[McpApprovalItem, Tag("mcp_approval_response")]
    | Annotated[CodeInterpreterItem, Tag("code_interpreter_call")]
    | Annotated[FileSearchItem, Tag("file_search_call")],
    by_type({kind: kind for kind in PROGRAM_TYPES}),
]


def call_of(item: ProgramCall | AnsweredCall) -> tuple[str, str, str]:
    """Returns the id of a call, the name of the called program or tool, and the arguments as JSON
    text."""
    match item:
        case LocalShellCallItem():
            return item.call_id or item.id or "", "local_shell", _json(item.action)
        case ShellCallItem():
            return item.call_id, "shell", _json(item.action)
        case ApplyPatchCallItem():
            return item.call_id, "apply_patch", _json(item.operation)
        case McpCallItem():
            return item.id, item.name, item.arguments
        case CodeInterpreterItem():
            return item.id, "code_interpreter", _json({"code": item.code or ""})
        case FileSearchItem():
            return item.id, "file_search", _json({"queries": item.queries or []})


def result_of(item: ProgramOutput | AnsweredCall) -> str:
    """Returns the result of a call as text. The text is empty if the item has no result."""
    match item:
        case LocalShellOutputItem():
            return item.output
        case ShellOutputItem():
            return _json(item.output)
        case ApplyPatchOutputItem():
            return item.output or item.status or ""
        case McpCallItem():
            return item.output or _text(item.error)
        case CodeInterpreterItem():
            return _joined(item.outputs, "logs")
        case FileSearchItem():
            return _joined(item.results, "text")


def _text(value: object) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return _json(value)


def _joined(parts: Sequence[dict[str, Any]] | None, name: str) -> str:
    """Returns the texts in the field `name` of each part, joined by line ends. Parts without such a
    text are left out."""
    return "\n".join(text for part in parts or () if isinstance(text := part.get(name), str))
