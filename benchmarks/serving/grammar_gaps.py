"""The delay of other clients' streams while the grammar of many tools is compiled.

    python -m benchmarks.serving.grammar_gaps

A whole system on loopback serves a few long streams. In each round a request arrives that must call
one of 200 tools with schemas of 2 KB, which no earlier request had. The rank compiles the grammar
of the tools for a second or more. The result is the longest time between two chunks of any stream.
It is measured twice in each round: while such a request is answered, and for the same time
afterwards. The second number is what the machine causes anyway. The smallest number of all rounds
counts, since other work on the machine only makes it larger. The same is measured with one small
tool, to show the cost of a usual grammar.

The model is the demo model with two changes: its chat template writes out only the name of the
first tool, so that the prompt stays short, and its context is long enough for so many tools.
"""

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks import local_system
from benchmarks.machine import ROOT
from benchmarks.serving.streams import Streams

TIMEOUT_S = 600.0
DEMO = ROOT / "models" / "demo"
TOOLS_IN_TEMPLATE = "{% if tools %}{{ tools[0].function.name }}{% endif %}"


def write_model(directory: Path) -> None:
    """Writes the demo model into `directory`, with a chat template that names the first tool, and
    with a long context."""
    template = json.loads((DEMO / "tokenizer_config.json").read_text())["chat_template"]
    changes = {
        "config.json": {"max_position_embeddings": 2**16},
        "tokenizer_config.json": {"chat_template": TOOLS_IN_TEMPLATE + template},
    }
    for file in DEMO.iterdir():
        if file.name in changes:
            changed = json.loads(file.read_text()) | changes[file.name]
            (directory / file.name).write_text(json.dumps(changed))
        else:
            (directory / file.name).symlink_to(file)


def tools(label: str, n_tools: int, n_members: int) -> list[dict[str, Any]]:
    """Returns `n_tools` tools with `n_members` arguments each. All names begin with `label`. With a
    new label, no grammar of these tools has been compiled before."""
    return [
        {
            "type": "function",
            "function": {
                "name": f"{label}_{number}",
                "parameters": {
                    "type": "object",
                    "properties": {
                        f"{label}_{number}_{member}": {
                            "type": "string",
                            "enum": ["a", f"b{member}"],
                        }
                        for member in range(n_members)
                    },
                    "required": [f"{label}_{number}_{member}" for member in range(n_members)],
                },
            },
        }
        for number in range(n_tools)
    ]


async def call_tool(client: httpx.AsyncClient, offered: list[dict[str, Any]]) -> float:
    """Sends a request that must call one of the tools `offered`. Returns the seconds until its
    answer is complete. Raises RuntimeError if the request is refused."""
    body = {
        "messages": [{"role": "user", "content": "Which whale?"}],
        "tools": offered,
        "tool_choice": "required",
        "max_tokens": 4,
    }
    start = time.perf_counter()
    response = await client.post("/v1/chat/completions", json=body)
    if response.status_code != httpx.codes.OK:
        raise RuntimeError(response.text[:1000])
    return time.perf_counter() - start


async def measure(options: argparse.Namespace) -> None:
    """Starts a system, and prints the longest times between chunks: for 200 tools, and for one
    small tool."""
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory))
        arguments = (
            f"--model={directory}",
            f"--stages={options.stages}",
            "--frontend=tool_parser=hermes",
            "--log-level=ERROR",
        )
        async with (
            local_system.running(arguments) as system,
            httpx.AsyncClient(base_url=system.http, timeout=TIMEOUT_S) as client,
            Streams.running(client, options.streams, options.n_tokens) as others,
        ):
            await call_tool(client, tools("first", 1, 1))
            for title, n_tools, n_members in (
                ("200 tools", 200, options.members),
                ("1 tool", 1, 4),
            ):
                print(title)
                await rounds(client, others, options, n_tools=n_tools, n_members=n_members)


async def rounds(
    client: httpx.AsyncClient,
    others: Streams,
    options: argparse.Namespace,
    *,
    n_tools: int,
    n_members: int,
) -> None:
    """Sends a request with new tools in each round. Prints the longest time between chunks during
    and after each request, and the smallest of these times over all rounds."""
    quiet, busy, answers = [], [], []
    for number in range(options.rounds):
        offered = tools(f"t{n_tools}x{number}", n_tools, n_members)
        others.take()
        answers.append(await call_tool(client, offered))
        busy.append(max(others.take(), default=0.0))
        await asyncio.sleep(answers[-1])
        quiet.append(max(others.take(), default=0.0))
        print(
            f"  longest gap {busy[-1]:.3f} s while a request with {len(json.dumps(offered))} "
            f"characters of tools is answered in {answers[-1]:.2f} s, {quiet[-1]:.3f} s after it"
        )
    print(
        f"  smallest {min(busy):.3f} s, {min(quiet):.3f} s without such a request; answered in "
        f"{min(answers):.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--n-tokens", type=int, default=900, help="tokens of each stream")
    parser.add_argument("--members", type=int, default=30, help="members of each tool's arguments")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=8)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
