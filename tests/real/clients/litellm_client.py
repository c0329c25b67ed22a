"""What users of `litellm` write: `litellm_client.py CASE URL` prints as JSON what it returns."""

import json
import sys
from typing import Any

import litellm

QUESTION = {"role": "user", "content": "What is the capital of France?"}


def completion(url: str) -> Any:
    """The text of a chat, whole and streamed."""
    whole = ask(url, [QUESTION])
    pieces = ask(url, [QUESTION], stream=True)
    return {
        "whole": whole.choices[0].message.content,
        "streamed": "".join(piece.choices[0].delta.content or "" for piece in pieces),
        "tokens": whole.usage.completion_tokens,
    }


def text(url: str) -> Any:
    """The text of a completion."""
    answer = litellm.text_completion(
        model="text-completion-openai/smollm2",
        api_base=f"{url}/v1",
        prompt="The capital of France is",
        max_tokens=8,
        temperature=0,
    )
    return answer.choices[0].text


def own_message(url: str) -> Any:
    """A second turn that holds the message of the first as litellm itself returned it."""
    message = ask(url, [QUESTION]).choices[0].message
    assert message.model_dump()["provider_specific_fields"] is not None
    again = {"role": "user", "content": "And of Italy?"}
    second = ask(url, [QUESTION, message.model_dump(), again])
    third = ask(url, [QUESTION, message, again])
    return [second.choices[0].message.content, third.choices[0].message.content]


def ask(url: str, messages: list[Any], **options: Any) -> Any:
    return litellm.completion(
        model="openai/smollm2",
        api_base=f"{url}/v1",
        messages=messages,
        max_tokens=16,
        temperature=0,
        **options,
    )


if __name__ == "__main__":
    sys.stdout.write(json.dumps(globals()[sys.argv[1]](sys.argv[2])) + "\n")
