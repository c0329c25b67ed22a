"""Fuzzing target: bodies of the HTTP API, up to the requests that are made from them."""

import json

from services.common import errors
from services.frontend.http.bodies.reader import parse_body
from services.frontend.http.openai.chat_request import ChatBody
from services.frontend.http.openai.completion_request import CompletionBody
from tests.fuzz.coverage.target import Choices, Target, any_bytes

COMPLETION = {
    "model": "demo",
    "prompt": ["a", "b"],
    "max_tokens": 5,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "min_p": 0.1,
    "seed": 7,
    "stop": ["x"],
    "stop_token_ids": [1, 2],
    "n": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
    "logit_bias": None,
    "return_token_ids": True,
    "resumption": {"seed": 7, "token_ids": [[1], []]},
}
CHAT = {
    "model": "demo",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "u"}], "name": "n"},
    ],
    "max_completion_tokens": 5,
    "tools": None,
}
LAST_EVENT_ID = "0123456789abcdef" * 2 + ":1,-"


def run(data: bytes) -> None:
    """Takes bytes as a body, or changes a body by them."""
    choices = Choices(data)
    kind, body = choices.one_of([(CompletionBody, COMPLETION), (ChatBody, CHAT)])
    last_event_id = choices.one_of([None, LAST_EVENT_ID])
    content = data[2:]
    if choices.number(2):
        content = json.dumps(choices.changed(body, tuple(kind.model_fields))).encode()
    try:
        parsed = parse_body(kind, content)
        parsed.resume_at(last_event_id)
        parsed.to_request().check()
    except errors.InvalidRequest as error:
        str(error).encode()  # which a client is to get


TARGET = Target(
    run=run,
    seeds=[
        *any_bytes(b"\0\0\1"),
        *any_bytes(b"\1\1\1"),
        b"\0\0\0" + json.dumps(COMPLETION).encode(),
        b"\1\0\0" + json.dumps(CHAT).encode(),
    ],
    words=[f'"{name}":' for name in (*COMPLETION, *CHAT)] + ["[[", "{}", "1e999", "NaN", "\\ud800"],
)
