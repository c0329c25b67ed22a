"""The cost of structured output: tokens per second with a JSON schema and without.

    python -m benchmarks.serving.structured_output [MODEL]

A whole system on loopback serves equal numbers of requests with and without a schema, in turn, in
alternating order. All requests are sampled. All answers have one length, since a text that the
schema allows is longer than the largest answer. In each round the throughput with a schema is
divided by the throughput without. The result is the median of these ratios, so that a short
disturbance by other work on the machine does not change it. The result should be 0.9 at least.
"""

import argparse
import asyncio
import json
import statistics
import time
from typing import Any

import httpx

from benchmarks import local_system

TIMEOUT_S = 600.0


def schema(number: int, *, n_tokens: int) -> dict[str, Any]:
    """Returns a JSON schema, different for each `number`. Every object that the schema allows is
    longer than an answer of `n_tokens` tokens."""
    text = {"type": "string", "minLength": 8 * n_tokens, "maxLength": 16 * n_tokens}
    kind = {"enum": [f"whale {number}", "orca", "narwhal"]}
    return {
        "type": "object",
        "properties": {"kind": kind, "size": {"type": "integer"}, "notes": text},
        "required": ["kind", "size", "notes"],
        "additionalProperties": False,
    }


def bodies(options: argparse.Namespace, *, is_constrained: bool) -> list[dict[str, Any]]:
    """Returns the bodies of the requests of a round, with a schema or without."""
    common = {"max_tokens": options.n_tokens, "temperature": 1.0}
    if not is_constrained:
        common["ignore_eos"] = True
    requests = [{**common, "prompt": f"Whale {i}", "seed": i} for i in range(options.requests)]
    if is_constrained:
        for number, request in enumerate(requests):
            wanted = schema(number % options.schemas, n_tokens=options.n_tokens)
            request["guided_json"] = json.dumps(wanted)
    return requests


async def tokens_per_s(client: httpx.AsyncClient, requests: list[dict[str, Any]]) -> float:
    """Sends all requests at once. Returns the generated tokens per second until the last answer is
    complete."""
    start = time.perf_counter()
    answers = await asyncio.gather(
        *(client.post("/v1/completions", json=request) for request in requests)
    )
    seconds = time.perf_counter() - start
    n_tokens = 0
    for answer in answers:
        if answer.status_code != httpx.codes.OK:
            raise RuntimeError(answer.text)
        n_tokens += answer.json()["usage"]["completion_tokens"]
    if n_tokens != sum(request["max_tokens"] for request in requests):
        raise RuntimeError("an answer ended early")
    return n_tokens / seconds


async def measure(options: argparse.Namespace) -> None:
    """Prints the throughput without and with a schema in each round, and the median over all rounds
    of the second divided by the first."""
    plain = bodies(options, is_constrained=False)
    constrained = bodies(options, is_constrained=True)
    arguments = (f"--model={options.model}", f"--stages={options.stages}", "--log-level=ERROR")
    limits = httpx.Limits(max_connections=options.requests)
    async with (
        local_system.running(arguments) as system,
        httpx.AsyncClient(base_url=system.http, timeout=TIMEOUT_S, limits=limits) as client,
    ):
        await tokens_per_s(client, plain)
        await tokens_per_s(client, constrained)
        ratios = []
        for number in range(options.rounds):
            if number % 2:
                without = await tokens_per_s(client, plain)
                with_schema = await tokens_per_s(client, constrained)
            else:
                with_schema = await tokens_per_s(client, constrained)
                without = await tokens_per_s(client, plain)
            ratios.append(with_schema / without)
            print(f"{without:8.1f} tokens/s, with a schema {with_schema:8.1f}: {ratios[-1]:.3f}")
    print(f"median ratio {statistics.median(ratios):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="models/demo")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--n-tokens", type=int, default=96)
    parser.add_argument("--schemas", type=int, default=4, help="different schemas")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
