"""Requests of all kinds whose answers have receipts: plain and seeded, with penalties, stop
strings, grammars, log-probabilities, several answers and adapters. None is like another, and many
begin with the same tokens."""

import itertools
from collections.abc import Iterator
from random import Random
from typing import Any

from tests.faults.workload import FIRST_TOKEN, KINDS, VOCAB_SIZE, Protocol, Question

ADAPTER = "law"
"""Name of the adapter."""

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2, None]}, "b": {"type": "array", "items": {"enum": ["x"]}}},
    "required": ["a", "b"],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}

OPTIONS: list[tuple[str, Protocol, dict[str, Any]]] = [
    *((kind, protocol, KINDS[kind]) for kind in KINDS for protocol in ("completions", "grpc")),
    ("repeated", "completions", {"temperature": 0.0, "ignore_eos": True}),
    ("banned", "completions", {"bad_words": ["a", "the"], "logit_bias": {"50": 3, "60": -4}}),
    ("logprobs", "completions", {"logprobs": 3}),
    ("logprobs", "chat", {"logprobs": True, "top_logprobs": 2, "temperature": 0.6}),
    ("regex", "completions", {"regex": "(ab|c){2,5}-[0-9]{3}"}),
    ("schema", "chat", {"response_format": FORMAT}),
    ("adapter", "completions", {"model": ADAPTER}),
    ("adapter", "chat", {"model": ADAPTER, "temperature": 0.0}),
]
"""Kind, protocol and options of requests."""

N_BEGINNINGS, BEGINNING_TOKENS = 4, 64
GRAMMAR_TOKENS = 160
"""Tokens that an answer with a grammar may have: enough for its end."""


def signed_questions(random: Random) -> Iterator[Question]:
    """Yields questions without end."""
    beginnings = [_tokens(random, BEGINNING_TOKENS) for _ in range(N_BEGINNINGS)]
    for number in itertools.count():
        kind, protocol, given = OPTIONS[number % len(OPTIONS)]
        max_tokens = random.choice([random.randint(1, 30), random.randint(30, 100)])
        options = {"max_tokens": max(max_tokens, given.get("min_tokens", 0))}
        if kind in ("regex", "schema"):
            options["max_tokens"] = GRAMMAR_TOKENS
        if given.get("temperature", 1.0) and random.random() < 0.8:
            options["seed"] = random.randrange(2**40)
        prompt = _tokens(random, random.randint(1, 30))
        if protocol != "chat" and random.random() < 0.5:
            prompt = random.choice(beginnings) + prompt
        yield Question(
            f"{kind} {protocol}", protocol, prompt, {**options, **given, "receipt": True}
        )


def _tokens(random: Random, n_tokens: int) -> tuple[int, ...]:
    return tuple(random.randrange(FIRST_TOKEN, VOCAB_SIZE) for _ in range(n_tokens))
