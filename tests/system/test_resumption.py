"""A frontend dies under its clients' streams, and they go on at another, token for token."""

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from orcinus_client import Client

from tests.system.stack import ROOT, Stack

N_BEFORE = 20
"""Chunks that each client has seen when the frontend is killed; several hundred are to come."""

LONG = {"max_tokens": 400, "ignore_eos": True}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/completions", {"prompt": [5, 6, 7], "temperature": 0, **LONG}),
    ("/completions", {"prompt": "the quick", "seed": 3, "n": 2, "min_tokens": 400, **LONG}),
    ("/completions", {"prompt": [[8], [9, 10]], "seed": 4, "repetition_penalty": 1.3, **LONG}),
    (
        "/chat/completions",
        {
            "messages": [{"role": "user", "content": "hello"}],
            "seed": 5,
            "frequency_penalty": 0.5,
            "stream_options": {"include_usage": True},
            **LONG,
        },
    ),
]


@contextlib.contextmanager
def frontend(stack: Stack, model: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """One more frontend of a stack, and its base URL."""
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "services.frontend", f"--model={model}"),
            *(f"--scheduler={stack.scheduler_address()}", "--http-address=127.0.0.1:0"),
            *("--grpc-address=127.0.0.1:0", f"--ready-fd={writing}"),
        ],
        cwd=ROOT,
        pass_fds=[writing],
    )
    os.close(writing)
    try:
        with open(reading) as ready:  # a service stops where nobody has the other end
            addresses: dict[str, str] = {}
            while "http" not in addresses:
                addresses = json.loads(ready.readline())
            yield process, f"http://{addresses['http']}/v1"
    finally:
        process.kill()
        process.wait()


def answers(chunks: list[dict[str, Any]]) -> dict[int, list[Any]]:
    """The pieces of each answer, in order, and the usage at -1. What was cached depends on what was
    asked before."""
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    for usage in usages:
        del usage["prompt_tokens_details"]
    found: dict[int, list[Any]] = {-1: usages}
    for chunk in chunks:
        for choice in chunk["choices"]:
            found.setdefault(choice["index"], []).append(choice)
    return found


def test_streams_of_a_frontend_that_is_killed_go_on_at_another(
    one_stage: Stack, model: Path
) -> None:
    with (
        frontend(one_stage, model) as (victim, first),
        frontend(one_stage, model) as (_, second),
        Client(first, second) as client,
        Client(second) as other,
        ThreadPoolExecutor(len(REQUESTS)) as threads,
    ):
        streams = [client.stream(*request) for request in REQUESTS]
        begun = list(threads.map(lambda stream: list(itertools.islice(stream, N_BEFORE)), streams))
        victim.kill()
        victim.wait()
        rest: list[list[dict[str, Any]]] = list(threads.map(list, streams))
        undisturbed = [list(other.stream(*request)) for request in REQUESTS]
    for before, after, whole in zip(begun, rest, undisturbed, strict=True):
        assert len({chunk["id"] for chunk in before + after}) == 1
        assert answers(before + after) == answers(whole)
