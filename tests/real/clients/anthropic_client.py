"""Programs of users of `anthropic`: `anthropic_client.py CASE URL` prints what CASE returns."""

import json
import sys
from typing import Any

import anthropic

GREEDY = {"temperature": 0}
"""The package has no argument for it any more."""

QUESTION: Any = {"role": "user", "content": "What is the capital of France?"}
WEATHER: Any = {
    "name": "get_weather",
    "description": "Returns the weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CALL_IT: Any = {"type": "tool", "name": "get_weather"}


def create(url: str) -> Any:
    """Returns the text of a message and its token counts."""
    message: Any = client(url).messages.create(
        model="smollm2", max_tokens=16, messages=[QUESTION], extra_body=GREEDY
    )
    return {
        "text": message.content[0].text,
        "reason": message.stop_reason,
        "tokens": message.usage.output_tokens,
    }


def stream(url: str) -> Any:
    """The text of a message in pieces."""
    with client(url).messages.stream(
        model="smollm2", max_tokens=16, messages=[QUESTION], extra_body=GREEDY, system="Be brief."
    ) as events:
        text = "".join(events.text_stream)
        message: Any = events.get_final_message()
    return {"text": text, "whole": message.content[0].text, "reason": message.stop_reason}


def tool_loop(url: str) -> Any:
    """A streamed call that the model must make, its result sent back, and the model's last word."""
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    with client(url).messages.stream(
        model="smollm2", max_tokens=64, messages=messages, tools=[WEATHER], tool_choice=CALL_IT
    ) as events:
        kinds = [event.type for event in events]
        call = events.get_final_message()
    [use] = [block for block in call.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "20 °C and sunny"}
    messages.append({"role": "assistant", "content": call.content})
    messages.append({"role": "user", "content": [result]})
    answer: Any = client(url).messages.create(
        model="smollm2",
        max_tokens=16,
        messages=messages,
        tools=[WEATHER],
        tool_choice={"type": "none"},
    )
    return {
        "events": sorted(set(kinds)),
        "name": use.name,
        "input": use.input,
        "reason": call.stop_reason,
        "answer": answer.content[0].text,
    }


def client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, max_retries=0)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(globals()[sys.argv[1]](sys.argv[2])) + "\n")
