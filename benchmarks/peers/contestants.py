"""The contestants of `benchmarks.peers.compare`: our local systems over HTTP, and peers.

Each contestant runs in processes of its own.
"""

import argparse
import asyncio
import contextlib
import json
import shlex
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from benchmarks import local_system
from benchmarks.peers import peer_process
from benchmarks.peers.catalogue import PEERS
from benchmarks.peers.peer_process import PeerProcess
from benchmarks.records import RequestRecord
from benchmarks.serving import load
from benchmarks.serving.openai_client import OpenAIClient
from benchmarks.workload import PlannedRequest

OURS = "ours"
OUR_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
OUR_OPTIONS = "--max-batch-size=64 --kv-memory=2GiB --no-prefix-cache"
"""Options that give our system the largest batch and the K/V memory that the peers have.

The prefix cache is off, since each run repeats the prompts of the run before.
"""

ANSWER_LIMIT_S = 600.0
"""Timeout in seconds for one answer."""


class Ours:
    """An Orcinus system on this machine, used over HTTP."""

    def __init__(self, name: str, system: local_system.System, options: Sequence[str]) -> None:
        self.name = name
        self.about = {"options": list(options)}
        self._system = system
        self._client = OpenAIClient(system.http, model=system.model)

    @property
    def pid(self) -> int:
        return self._system.pid

    async def run(self, requests: Sequence[PlannedRequest]) -> list[RequestRecord]:
        return await load.run(self._client, requests)

    async def tokens(self, requests: Sequence[PlannedRequest]) -> list[list[int]]:
        """Returns the greedy tokens of each request. The requests run one after the other."""
        return [await asyncio.to_thread(self._complete, request) for request in requests]

    def _complete(self, request: PlannedRequest) -> list[int]:
        body = {
            "model": self._system.model,
            "prompt": request.prompt_token_ids,
            "max_tokens": request.n_output,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        call = urllib.request.Request(
            f"{self._system.http}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(call, timeout=ANSWER_LIMIT_S) as response:
            tokens: list[int] = json.load(response)["choices"][0]["token_ids"]
        return tokens


class Peer:
    """A peer's engine in a process of its own."""

    def __init__(self, process: PeerProcess) -> None:
        self.name = process.name
        self.about = process.about
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def run(self, requests: Sequence[PlannedRequest]) -> list[RequestRecord]:
        done, _ = await asyncio.to_thread(self._process.run, requests)
        return done

    async def tokens(self, requests: Sequence[PlannedRequest]) -> list[list[int]]:
        """Returns the greedy tokens of each request. The requests run one after the other."""
        return [
            (await asyncio.to_thread(self._process.run, [request]))[1][0] for request in requests
        ]


def options_of_ours(given: str, *, model: Path, dtype: str, threads: int) -> list[str]:
    """Returns the command line of one of our local systems: model, type, default options and
    `given`. Unless `given` has `--threads`, `threads` are divided among all ranks."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--threads", type=int)
    mine, _ = parser.parse_known_args(shlex.split(given))
    options = [f"--model={model}", f"--dtype={OUR_DTYPES[dtype]}", *shlex.split(OUR_OPTIONS)]
    if mine.threads is None:
        options.append(f"--threads={max(1, threads // (mine.stages * mine.tp))}")
    return [*options, *shlex.split(given)]


async def start(
    options: argparse.Namespace, stack: contextlib.AsyncExitStack
) -> tuple[list[Ours], list[Peer]]:
    """Starts all engines, one after the other, and loads their models. They end when `stack` is
    closed."""
    shared = {"model": options.model.resolve(), "dtype": options.dtype, "threads": options.threads}
    peers = []
    for name in tqdm(options.peers, desc="starting peers", leave=False):
        process = await asyncio.to_thread(
            peer_process.start,
            PEERS[name],
            venvs=options.venvs,
            options=options.peer_options.get(name, []),
            **shared,
        )
        peers.append(Peer(stack.enter_context(process)))
    ours = []
    for number, given in enumerate(options.ours or [""], 1):
        arguments = options_of_ours(given, **shared)
        system = await stack.enter_async_context(local_system.running(arguments))
        ours.append(Ours(OURS if number == 1 else f"{OURS} {number}", system, arguments))
    return ours, peers
