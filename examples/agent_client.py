"""An agent: a model that calls a function of this program until the model answers with text.

python examples/agent_client.py [base URL]

The model must be able to call tools, as Qwen3-0.6B is. The server keeps no conversations between
calls, so each call has the whole conversation; the server's prefix cache recognises the part that
was sent before.
"""

import json
import sys
from pathlib import Path
from typing import Any

import openai

MAX_TURNS = 4
"""Calls to the model at most: a model that finds no end must not run for ever."""

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "count_lines",
            "description": "Counts the lines of a text file.",
            "strict": True,  # also where the model chooses to call, arguments keep the schema
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string", "maxLength": 80}},
                "required": ["path"],
                "additionalProperties": False,
            },
        },
    }
]


def count_lines(arguments: str) -> str:
    """Returns what the model is told of a file. Errors are told too: the model may do better. The
    arguments are no JSON if `max_tokens` cut them off."""
    try:
        text = Path(json.loads(arguments)["path"]).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        return f"error: {error}"
    return f"{len(text.splitlines())} lines"


def main(base_url: str) -> None:
    with openai.OpenAI(base_url=base_url, api_key="unused") as client:
        model = client.models.list().data[0].id
        question = "How many lines has README.md? Use the tool."
        messages: list[Any] = [{"role": "user", "content": question}]
        for turn in range(MAX_TURNS):
            answer = client.chat.completions.create(
                model=model,
                messages=messages,
                tools=TOOLS,
                tool_choice="required" if turn == 0 else "auto",  # a grammar makes the first a call
                max_tokens=64,
                temperature=0,
            )
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                print(f"answer: {message.content}")
                return
            for call in message.tool_calls:
                assert call.type == "function"  # the server knows no other kind
                result = count_lines(call.function.arguments)
                print(f"{call.function.name}({call.function.arguments}) = {result}")
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        print(f"no answer in words after {MAX_TURNS} turns")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1")
