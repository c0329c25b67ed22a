"""The frontend's processor time per token of streamed chats, with each parser of tool calls and of
reasoning, and as a multiple of plain text.

    python -m benchmarks.control.parsers
    python -m benchmarks.control.parsers --answers 1000 --parsers hermes harmony --json FILE

Runs the control plane of `benchmarks.control.cpu`, whose rank samples fixed tokens. Every chat has
a tool, so that the parser reads each token; the tokens are content. With `--rounds`, parsers take
turns, and the best round of each counts.
"""

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any, get_args

import httpx
import uvloop

from benchmarks import machine
from benchmarks.control.cpu import null_plane
from services.frontend.settings import ReasoningParser, ToolParser

PLAIN = "none"
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}


async def measure_parser(options: argparse.Namespace, name: str) -> float:
    """Returns the frontend's processor time with a parser, in microseconds per token."""
    tools = name if name in get_args(ToolParser) else PLAIN
    reasoning = name if name in get_args(ReasoningParser) else PLAIN
    async with (
        null_plane(
            options,
            compute_ms=options.compute_ms,
            max_batch_size=options.at_once,
            max_batch_tokens=max(2048, options.at_once),
            frontend_options=(f"--tool-parser={tools}", f"--reasoning-parser={reasoning}"),
        ) as plane,
        httpx.AsyncClient(
            base_url=plane.http, timeout=600, limits=httpx.Limits(max_connections=options.at_once)
        ) as client,
    ):
        await asyncio.gather(*(_chat(client, options) for _ in range(options.at_once)))
        before = plane.used()["frontend"]
        await asyncio.gather(*(_chat(client, options) for _ in range(options.answers)))
        used = plane.used()["frontend"].since(before)
    n_tokens: int = options.answers * options.tokens
    return 1e6 * used.cpu_s / n_tokens


async def _chat(client: httpx.AsyncClient, options: argparse.Namespace) -> None:
    """Streams one answer."""
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
    names = [PLAIN, *options.parsers]
    costs: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name in names:
            costs[name].append(await measure_parser(options, name))
    plain = min(costs[PLAIN])
    print(f"{'parser':>12} {'us per token':>13} {'of plain':>9}   best of {options.rounds} rounds")
    rows: list[dict[str, Any]] = []
    for name, found in costs.items():
        us, ratio = min(found), min(found) / plain
        print(f"{name:>12} {us:>13.1f} {ratio:>9.2f}")
        rows.append({"parser": name, "us": round(us, 1), "of_plain": round(ratio, 3)})
    if options.json is not None:
        options.json.write_text(json.dumps({**machine.describe(), "parsers": rows}, indent=1))


def main() -> None:
    """Runs the command."""
    all_names = dict.fromkeys((*get_args(ToolParser)[2:], *get_args(ReasoningParser)[2:]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="models/demo", help="whose tokenizer is used")
    parser.add_argument("--parsers", nargs="+", choices=list(all_names), default=list(all_names))
    parser.add_argument("--answers", type=int, default=1000, help="with each parser")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--at-once", type=int, default=64, help="answers at the same time")
    parser.add_argument("--compute-ms", type=float, default=5.0, help="of each iteration")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
