"""The cost of sampling options: tokens per second of batches with mixed options, and without.

    python -m benchmarks.serving.sampling_options [MODEL] [--each]

A whole system on loopback serves equal numbers of requests with and without options, in turn, in
alternating order. In a mixed round each request has another option, or several, so that every batch
has all of them. The cost of a round is the throughput of greedy requests divided by the throughput
of the mixed requests. The result is the median over the rounds, so that a short disturbance by
other work on the machine does not change it. It should be 3 at most. With `--each`, the cost of
each kind of option in a batch of its own follows.
"""

import argparse
import asyncio
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from benchmarks import local_system
from benchmarks.serving.structured_output import TIMEOUT_S, tokens_per_s

GREEDY: Mapping[str, Any] = {"temperature": 0}

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 40},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "top_k and top_p": {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "logit_bias": {"temperature": 0.8, "logit_bias": {str(token): 2.0 for token in range(100)}},
    "bad_token_ids": {"temperature": 0.8, "bad_token_ids": list(range(100))},
    "min_tokens": {"temperature": 0.8, "min_tokens": 1000},
    "logprobs": {"temperature": 0, "logprobs": 0},
    "5 logprobs": {"temperature": 0, "logprobs": 5},
    "20 logprobs": {"temperature": 0.8, "top_p": 0.95, "logprobs": 20},
}
"""Kinds of sampling options as fields of the request, by name. A mixed batch has all of them."""


def bodies(
    kinds: Sequence[Mapping[str, Any]], *, n_requests: int, n_tokens: int
) -> list[dict[str, Any]]:
    """Returns the bodies of the requests of a round, which use the elements of `kinds` in turn."""
    requests = []
    for number in range(n_requests):
        options = dict(kinds[number % len(kinds)])
        if "min_tokens" in options:
            options["min_tokens"] = n_tokens
        common = {"prompt": f"Whale {number}", "max_tokens": n_tokens, "ignore_eos": True}
        requests.append({**common, "seed": number, **options})
    return requests


async def cost(
    client: httpx.AsyncClient,
    greedy: list[dict[str, Any]],
    others: list[dict[str, Any]],
    *,
    n_rounds: int,
) -> float:
    """Returns the throughput of the requests `greedy` divided by the throughput of `others`, as the
    median over the rounds."""
    await tokens_per_s(client, others)
    ratios = []
    for number in range(n_rounds):
        if number % 2:
            without, having = await tokens_per_s(client, greedy), await tokens_per_s(client, others)
        else:
            having, without = await tokens_per_s(client, others), await tokens_per_s(client, greedy)
        ratios.append(without / having)
        print(f"{without:8.1f} tokens/s, with options {having:8.1f}: {ratios[-1]:.3f}", flush=True)
    return statistics.median(ratios)


async def measure(options: argparse.Namespace) -> None:
    """Starts a system, measures the costs and prints them."""
    size = {"n_requests": options.requests, "n_tokens": options.n_tokens}
    greedy = bodies([GREEDY], **size)
    arguments = [f"--model={options.model}", f"--stages={options.stages}", "--log-level=ERROR"]
    if options.load_format is not None:
        arguments.append(f"--load-format={options.load_format}")
    limits = httpx.Limits(max_connections=options.requests)
    async with (
        local_system.running(arguments) as system,
        httpx.AsyncClient(base_url=system.http, timeout=TIMEOUT_S, limits=limits) as client,
    ):
        await tokens_per_s(client, greedy)
        mixed = bodies(list(OPTIONS.values()), **size)
        print(f"mixed: {await cost(client, greedy, mixed, n_rounds=options.rounds):.3f}")
        for name, kind in OPTIONS.items() if options.each else ():
            own = bodies([kind], **size)
            print(f"{name}: {await cost(client, greedy, own, n_rounds=options.rounds):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="models/demo")
    parser.add_argument("--load-format", choices=["safetensors", "random"])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--n-tokens", type=int, default=64)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--each", action="store_true", help="each kind of option by itself, too")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
