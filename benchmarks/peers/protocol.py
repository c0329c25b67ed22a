"""The protocol between an adapter and the benchmark: messages on a pipe, each a line of JSON.

    adapter    {"ready": {"versions": {...}, "settings": {...}}}          once it has its model
    benchmark  {"requests": [{"arrival_s", "prompt_token_ids", "n_output", "follows"}, ...]}
    adapter    {"requests": [{"arrival_s", "start_s", "first_token_s", "end_s", "n_prompt",
                              "n_output"}, ...], "token_ids": [[...], ...]}

Times are seconds since the run's start; `start_s` is the time at which the engine received the
request. A request whose `follows` is the index of another request is a further turn of that
request's chat. Its tokens come after the other request's prompt and answer. Its `arrival_s` in the
benchmark's message counts from the end of the other request; in the adapter's message it counts
from the run's start, like all other times. For a request that is no further turn, `follows` is None
or missing.

An adapter passes an `Engine` to `serve`, which submits requests when they are due and steps the
engine, so that all peers are driven by the same loop. Output that an engine prints goes to standard
error: `serve` keeps the pipe of standard output for itself.

This module runs in a peer's environment, with nothing but the standard library.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import IO, Any, Protocol

TokenIds = Sequence[int]


class Engine(Protocol):
    """A loaded model that decodes greedily and does not stop at tokens that end a text."""

    versions: dict[str, str]
    """Versions of the packages that affect results."""
    settings: dict[str, Any]
    """Settings of the engine, for the record."""

    def submit(self, index: int, prompt_token_ids: TokenIds, n_output: int) -> None:
        """Submits a request for `n_output` tokens. `step` returns its tokens by the key `index`."""

    def step(self) -> dict[int, TokenIds]:
        """Computes one step, and returns the new tokens of each request that has any, by the index
        of the request."""


def adapter_options(
    description: str | None, *, dtypes: Iterable[str], max_batch_size: int = 64
) -> argparse.ArgumentParser:
    """Returns a parser with the options that all adapters have. An adapter adds its own options."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint of transformers'")
    parser.add_argument("--converted", type=Path, help="where it lies in the engine's own format")
    parser.add_argument("--dtype", choices=sorted(dtypes), default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-batch-size", type=int, default=max_batch_size)
    return parser


class Pipe:
    """The adapter's end of the pipe. Redirects the process's standard output to standard error, so
    that only messages are written to the pipe."""

    def __init__(self) -> None:
        self._reader = sys.stdin
        self._writer: IO[str] = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def say(self, message: dict[str, Any]) -> None:
        self._writer.write(json.dumps(message) + "\n")
        self._writer.flush()

    def listen(self) -> dict[str, Any] | None:
        """Waits for the next message and returns it. Returns None if the benchmark has closed the
        pipe."""
        line = self._reader.readline()
        message: dict[str, Any] | None = json.loads(line) if line else None
        return message


def serve(pipe: Pipe, engine: Engine) -> None:
    """Reports that the engine is ready, and runs requests until the benchmark closes the pipe."""
    pipe.say({"ready": {"versions": engine.versions, "settings": engine.settings}})
    while (message := pipe.listen()) is not None:
        pipe.say(run(engine, message["requests"]))


def run(
    engine: Engine,
    requests: Sequence[dict[str, Any]],
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Submits each request when it is due, and steps the engine until all requests are complete.
    Returns the message with the times and tokens of all requests."""
    follower_of = {
        each["follows"]: index
        for index, each in enumerate(requests)
        if each.get("follows") is not None
    }
    first_turns = set(range(len(requests))) - set(follower_of.values())
    waiting = sorted((requests[index]["arrival_s"], index) for index in first_turns)  # a heap
    prompts = [each["prompt_token_ids"] for each in requests]
    records = [
        {"arrival_s": each["arrival_s"], "n_prompt": len(each["prompt_token_ids"])}
        for each in requests
    ]
    token_ids: list[list[int]] = [[] for _ in requests]
    running: set[int] = set()
    start = clock()

    def submit(index: int, now: float) -> None:
        running.add(index)
        records[index]["start_s"] = now
        engine.submit(index, prompts[index], requests[index]["n_output"])

    while waiting or running:
        now = clock() - start
        while waiting and waiting[0][0] <= now:
            submit(heappop(waiting)[1], now)
        if not running:
            sleep(waiting[0][0] - now)
            continue
        news = engine.step()
        now = clock() - start
        for index, tokens in news.items():
            if tokens:
                records[index].setdefault("first_token_s", now)
            token_ids[index].extend(tokens)
            if len(token_ids[index]) >= requests[index]["n_output"]:
                running.discard(index)
                records[index] |= {"end_s": now, "n_output": len(token_ids[index])}
                following = follower_of.get(index)
                if following is not None:
                    prompts[following] = [
                        *prompts[index],
                        *token_ids[index],
                        *prompts[following],
                    ]
                    due = now + requests[following]["arrival_s"]
                    records[following] |= {"arrival_s": due, "n_prompt": len(prompts[following])}
                    heappush(waiting, (due, following))
    return {"requests": records, "token_ids": token_ids}
