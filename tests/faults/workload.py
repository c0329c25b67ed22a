"""The requests that clients send: greedy and seeded, with penalties, stop strings, several answers
and conversations, over both protocols; long and short, so that some queue while others decode."""

from dataclasses import dataclass
from random import Random
from typing import Any, Literal

VOCAB_SIZE = 340  # the test tokenizer's
FIRST_TOKEN = 3  # those before it are special

Protocol = Literal["completions", "chat", "grpc"]

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0},
    "filtered": {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    "penalties": {
        "temperature": 0.7,
        "frequency_penalty": 0.6,
        "presence_penalty": 0.2,
        "repetition_penalty": 1.2,
    },
    "stop strings": {"temperature": 1.1, "stop": ["the", "ow", "q"], "min_tokens": 60},
    "several": {"temperature": 0.9, "n": 2},
}
"""Sampling options, by a name for each set of options."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request as it can be sent again and again; the same one has the same answers."""

    name: str
    protocol: Protocol
    prompt: tuple[int, ...]
    """Tokens of the prompt. A conversation has the token numbers as its text."""
    options: dict[str, Any]

    @property
    def n_answers(self) -> int:
        return int(self.options.get("n", 1))

    @property
    def body(self) -> dict[str, Any]:
        """The body of the OpenAI API, for a stream that shows tokens."""
        shared = {"stream": True, "return_token_ids": True, **self.options}
        if self.protocol == "chat":
            content = " ".join(map(str, self.prompt))
            return {"messages": [{"role": "user", "content": content}], **shared}
        return {"prompt": list(self.prompt), **shared}


def draw_questions(random: Random, n_questions: int) -> list[Question]:
    """Returns questions of all kinds and protocols in turn."""
    protocols: list[Protocol] = ["completions", "chat", "completions", "grpc", "completions"]
    questions = []
    for index in range(n_questions):
        kind = list(KINDS)[index % len(KINDS)]
        options = {**KINDS[kind], "max_tokens": random.randint(80, 320)}
        if options["temperature"]:
            options["seed"] = random.randrange(2**40)
        options["ignore_eos"] = kind != "seeded"  # these may end early
        protocol = protocols[index % len(protocols)]
        n_tokens = random.choice([random.randint(1, 30), random.randint(100, 400)])
        if protocol == "chat":
            n_tokens = min(n_tokens, 40)  # numbers are several tokens each
        prompt = tuple(random.randrange(FIRST_TOKEN, VOCAB_SIZE) for _ in range(n_tokens))
        questions.append(Question(f"{index} {kind} {protocol}", protocol, prompt, options))
    return questions
