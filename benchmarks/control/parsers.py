"""The frontend's processor time per token of streamed chats, with each parser of tool calls and of
reasoning, also as a multiple of the time without a parser.

    python -m benchmarks.control.parsers
    python -m benchmarks.control.parsers --rounds 20 --parsers hermes harmony --json FILE

Runs the control plane of `benchmarks.control.cpu`, whose rank samples fixed tokens. Every chat has
a tool, so that the parser reads each token. The tokens are plain content and no tool calls.

A frontend with a parser and a frontend without one serve the same plane. In every round each of
them streams a block of answers, both at the same time. Load of other programs then slows both, so
that the ratio of the two processor times hardly depends on it. The result is the median of the
rounds' ratios. The row `none` compares a frontend without a parser with another such frontend, and
so shows the noise that remains.
"""

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median
from typing import Any, get_args

import httpx
import uvloop

from benchmarks import machine
from benchmarks.control.null_plane import null_plane, start_frontend
from services.frontend.model_settings import ReasoningParser, ToolParser

PLAIN = "none"
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}


class Server:
    """A running frontend whose processor time is measured."""

    def __init__(self, address: str, pid: int, options: argparse.Namespace) -> None:
        self._url = f"http://{address}"
        self._clock = (~pid << 3) | 2
        """Id of the clock that counts the processor time of the frontend's process, computed as in
        Linux's `clock_getcpuclockid`."""
        self._options = options

    async def us_per_token(self) -> float:
        """Streams one block of answers, and returns the frontend's processor time in microseconds
        per token.

        Each block has new connections. If this client used the connections of the previous block
        again, it would start the answers so slowly that a block took three times as long, in
        smaller batches.
        """
        options = self._options
        limits = httpx.Limits(max_connections=options.answers)
        before = time.clock_gettime_ns(self._clock)
        async with httpx.AsyncClient(base_url=self._url, timeout=600, limits=limits) as client:
            await asyncio.gather(*(_chat(client, options) for _ in range(options.answers)))
        used_ns = time.clock_gettime_ns(self._clock) - before
        n_tokens: int = options.answers * options.tokens
        return used_ns / 1000 / n_tokens


@contextlib.asynccontextmanager
async def running(options: argparse.Namespace, scheduler: str, name: str) -> AsyncIterator[Server]:
    """Runs a frontend with the parser `name` inside the context, beside the scheduler's other
    frontends."""
    tools = name if name in get_args(ToolParser) else PLAIN
    reasoning = name if name in get_args(ReasoningParser) else PLAIN
    settings = (f"--tool-parser={tools}", f"--reasoning-parser={reasoning}")
    frontend = await start_frontend(options, scheduler, settings)
    try:
        server = Server(await frontend.wait_for("http"), frontend.pid, options)
        await server.us_per_token()  # fills the caches
        yield server
    finally:
        await frontend.stop()


async def measure_parser(
    options: argparse.Namespace, plain: Server, parsed: Server
) -> tuple[float, float]:
    """Returns two medians over all rounds: the processor time of the frontend `parsed` in
    microseconds per token, and its ratio to the processor time of `plain` in the same round."""
    pairs = [
        await asyncio.gather(plain.us_per_token(), parsed.us_per_token())
        for _ in range(options.rounds)
    ]
    return median(us for _, us in pairs), median(us / of_plain for of_plain, us in pairs)


async def _chat(client: httpx.AsyncClient, options: argparse.Namespace) -> None:
    """Streams the answer of one chat."""
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "tools": [TOOL],
        "max_tokens": options.tokens,
        "ignore_eos": True,
        "stream": True,
    }
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            raise RuntimeError((await response.aread()).decode())
        async for _ in response.aiter_raw():
            pass


async def measure(options: argparse.Namespace) -> None:
    """Measures all parsers, prints a table, and writes a record if `--json` is given."""
    rows: list[dict[str, Any]] = []
    async with (
        null_plane(
            options,
            compute_ms=options.compute_ms,
            max_batch_size=2 * options.answers,
            max_batch_tokens=max(2048, 2 * options.answers),
        ) as plane,
        running(options, plane.scheduler, PLAIN) as plain,
    ):
        print(f"{'parser':>15} {'us per token':>13} {'of plain':>9}   {options.rounds} rounds")
        for name in options.parsers:
            async with running(options, plane.scheduler, name) as parsed:
                us, ratio = await measure_parser(options, plain, parsed)
            print(f"{name:>15} {us:>13.1f} {ratio:>9.3f}", flush=True)
            rows.append({"parser": name, "us": round(us, 1), "of_plain": round(ratio, 3)})
    if options.json is not None:
        options.json.write_text(json.dumps({**machine.describe(), "parsers": rows}, indent=1))


def main() -> None:
    """Parses the command line and runs the benchmark."""
    all_names = dict.fromkeys((*get_args(ToolParser)[1:], *get_args(ReasoningParser)[2:]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="models/demo", help="whose tokenizer is used")
    parser.add_argument("--parsers", nargs="+", choices=list(all_names), default=list(all_names))
    parser.add_argument("--answers", type=int, default=64, help="of each block, all at once")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--compute-ms", type=float, default=5.0, help="of each iteration")
    parser.add_argument("--rounds", type=int, default=10, help="of two blocks, for each parser")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
