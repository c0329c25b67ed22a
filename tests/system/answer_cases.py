"""Requests and answers that servers tend to get wrong, and what clients must get, in the words of
the protocols."""

import json
from dataclasses import dataclass, field
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"

SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
}
FUNCTION = {"name": "write", "parameters": SCHEMA}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
TOOLS = [{"name": "write", "input_schema": SCHEMA}]
USER = {"role": "user", "content": "x"}
LONG = [{"role": "user", "content": "whale " * 2000}]
SEARCHED = [
    USER,
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {}}],
    },
]
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf"}}
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


def call(arguments: str, end: str = "}\n</tool_call>") -> str:
    return f'<tool_call>\n{{"name": "write", "arguments": {arguments}{end}'


def forced(**schema: Any) -> dict[str, Any]:
    """Returns the fields of a chat that must call a tool of one argument with a schema."""
    value = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return {
        "messages": [USER],
        "max_tokens": 5,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": value}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    }


@dataclass(frozen=True, kw_only=True)
class Case:
    """A request, the text that the model writes, and the answer that the client must get."""

    path: str
    body: dict[str, Any]
    says: str = ""
    status: int = 200
    gets: dict[str, Any] = field(default_factory=dict)
    """Expected values of the answer by their paths, or functions that return whether a value is
    right. In a path, `*` stands for all elements of a list."""
    named: str = ""
    """Expected text in the header that names fields which are left out or not enforced."""


def chat(says: str = "", *, gets: dict[str, Any] | None = None, **body: Any) -> Case:
    """Returns a chat whose first choice has the values `gets`, by paths in the choice."""
    paths = {f"choices.0.{path}": value for path, value in (gets or {}).items()}
    messages = "SAYS" if says else [USER]
    return Case(path=CHAT, says=says, gets=paths, body={"messages": messages, **body})


def turns(says: str = "", *, gets: dict[str, Any] | None = None, **body: Any) -> Case:
    """Returns a request of Anthropic's protocol."""
    fields = {"messages": "SAYS" if says else [USER], "max_tokens": 80, **body}
    return Case(path=MESSAGES, says=says, gets=gets or {}, body=fields)


def shown(content: Any, **more: Any) -> Case:
    """Returns a request of Anthropic's protocol whose last turn is a result of a tool."""
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [content]}
    body = {"messages": [*SEARCHED, {"role": "user", "content": [result]}], "max_tokens": 3}
    return Case(path=MESSAGES, body=body, **more)


ARGUMENTS = "message.tool_calls.0.function.arguments"
CALLED = {"message.content": None, ARGUMENTS: '{"path": "a"}', "finish_reason": "tool_calls"}

CASES = {
    # Numbers
    "no token": Case(
        path=COMPLETIONS,
        body={"prompt": "x", "max_tokens": 0},
        gets={"choices.0.text": "", "usage.completion_tokens": 0},
    ),
    "whole numbers with a point": chat(max_tokens=3.0, seed=7.0, n=1.0),
    "top_p of nothing": chat(max_tokens=3, top_p=0),
    "more tokens than there is room for": chat(
        "Hello", max_tokens=32000, gets={"message.content": "Hello", "finish_reason": "stop"}
    ),
    "only tokens of the content": chat(
        "Hello", max_tokens=9, logprobs=True, gets={"logprobs.content.*.token": [*"Hello"]}
    ),
    # Prompts that are too long
    "long prompt": Case(
        path=COMPLETIONS,
        body={"prompt": LONG[0]["content"]},
        status=400,
        gets={"error.code": "context_length_exceeded"},
    ),
    "long chat": Case(
        path=CHAT,
        body={"messages": LONG},
        status=400,
        gets={"error.code": "context_length_exceeded"},
    ),
    "long input": Case(
        path=RESPONSES,
        body={"input": LONG},
        status=400,
        gets={"error.code": "context_length_exceeded"},
    ),
    "long turns": Case(
        path=MESSAGES,
        body={"messages": LONG, "max_tokens": 5},
        status=400,
        gets={"error.message": lambda text: text.startswith("prompt is too long: 12")},
    ),
    "count of a long prompt": Case(
        path=f"{MESSAGES}/count_tokens",
        body={"messages": LONG},
        gets={"input_tokens": lambda n: n > 12000},
    ),
    "count of input": Case(
        path=f"{RESPONSES}/input_tokens",
        body={"input": "x"},
        gets={"object": "response.input_tokens", "input_tokens": lambda n: n > 0},
    ),
    # Calls
    "a brace too many": chat(
        call('{"path": "a"}', "}}\n</tool_call>"), tools=CHAT_TOOLS, gets=CALLED
    ),
    "a fence": chat(
        call('{"path": "a"}').replace("<tool_call>\n", "<tool_call>\n```json\n"),
        tools=CHAT_TOOLS,
        gets=CALLED,
    ),
    "a line end in a text": turns(
        call('{"path": "a", "text": "b\nc"}'),
        tools=TOOLS,
        gets={"content.0.input": {"path": "a", "text": "b\nc"}},
    ),
    "arguments beyond repair": turns(
        call('{"path" "a" b}'), tools=TOOLS, gets={"content.0.type": "text"}
    ),
    "a stop sequence in a call": turns(
        call('{"path": "a", "text": "b STOP c"}'),
        tools=TOOLS,
        stop_sequences=["STOP"],
        gets={"stop_reason": "stop_sequence", "stop_sequence": "STOP"},
    ),
    "a stop text in a call": chat(
        call('{"path": "a STOP c"}'),
        tools=CHAT_TOOLS,
        stop="STOP",
        gets={ARGUMENTS: '{"path": "a ', "finish_reason": "stop"},
    ),
    "a limit in a call": turns(
        call('{"path": "a"}'),
        tools=TOOLS,
        max_tokens=50,
        gets={"stop_reason": "max_tokens"},
    ),
    "one call at most": turns(
        f"{call('{}')}\n{call('{}')}",
        tools=TOOLS,
        max_tokens=200,
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        gets={"content.*.type": ["tool_use"], "stop_reason": "tool_use"},
    ),
    "a tool of a namespace": Case(
        path=RESPONSES,
        says=call("{}"),
        body={
            "input": "SAYS",
            "tools": [
                {
                    "type": "namespace",
                    "name": "files",
                    "description": "d",
                    "tools": [{"type": "function", **FUNCTION}],
                }
            ],
        },
        gets={"output.0.name": "write", "output.0.namespace": "files"},
    ),
    "a text of a regular expression": Case(
        path=RESPONSES,
        says=call('{"input": "ccc"}'),
        body={
            "input": "SAYS",
            "tools": [
                {
                    "type": "custom",
                    "name": "write",
                    "format": {"type": "grammar", "syntax": "regex", "definition": "a{3}"},
                }
            ],
        },
        gets={"output.0.input": "aaa", "status": "completed"},
    ),
    # Reasoning
    "reasoning that nobody asked for": turns(
        "<think>\nHm.\n</think>\n\nHello", gets={"content.*.text": ["Hello"]}
    ),
    "reasoning that is closed only": chat(
        "Hm.\n</think>\n\nHello", gets={"message.content": "Hm.\nHello"}
    ),
    # Schemas
    "a format that is not known": Case(path=CHAT, body=forced(type="string", format="password")),
    "a keyword that is not enforced": Case(
        path=CHAT,
        body=forced(**{"type": "string", "not": {"const": "x"}}),
        named="properties.a.not",
    ),
    "an object with a schema": chat(
        '{"b": "x"}',
        response_format={
            "type": "json_object",
            "schema": {
                "type": "object",
                "properties": {"a": {"type": "integer", "maximum": 9}},
                "required": ["a"],
            },
        },
        gets={"message.content": lambda text: [*json.loads(text)] == ["a"]},
    ),
    "a leap second at noon": chat(
        '"2024-01-01T12:22:60Z"',
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "t", "schema": {"type": "string", "format": "date-time"}},
        },
        gets={"message.content": lambda text: ":60" not in text},
    ),
    # Histories of agents
    "a found tool": shown({"type": "tool_reference", "tool_name": "write"}),
    "a picture of a tool": shown(PICTURE, named="image"),
    "a document of a tool": shown(PDF, named="document"),
    "a picture of the user": turns(
        messages=[{"role": "user", "content": [PICTURE]}, USER], max_tokens=3
    ),
    "a text document": turns(
        messages=[
            {
                "role": "user",
                "content": [{"type": "document", "source": {"type": "text", "data": "hello"}}],
            }
        ],
        max_tokens=3,
    ),
    "an answer that is begun": turns(
        messages=[USER, {"role": "assistant", "content": "{"}], max_tokens=3
    ),
    "further tools": Case(
        path=RESPONSES,
        body={
            "input": [
                {
                    "type": "additional_tools",
                    "role": "developer",
                    "tools": [{"type": "function", **FUNCTION}],
                },
                USER,
            ],
            "max_output_tokens": 3,
        },
    ),
}
