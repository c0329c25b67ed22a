"""`orcinus bench`: measures throughput and latency of a server under a number of concurrent users.

For comparisons with other engines, see `benchmarks/` in the sources.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

from services.cli.arguments import count
from services.cli.load import Answered, Load
from services.cli.local_system import DoesNotServe
from services.cli.target import Target, add_options, opened, parsed
from services.common.ending import give_up
from services.common.http_api import ApiError

PERCENTILES = (50, 90, 99)
TEXT = "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs."
"""Text from whose tokens the prompts are made. Each token of a prompt is chosen at random."""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="orcinus bench", description="Measures throughput and latency over HTTP."
    )
    add_options(made)
    for name, default, what in (
        ("users", 8, "users at once, each with one request after the other"),
        ("requests", 64, "requests of all users together"),
        ("prompt-tokens", 128, "tokens of each prompt"),
        ("output-tokens", 64, "tokens of each output"),
    ):
        made.add_argument(f"--{name}", type=count, default=default, help=f"{what} ({default})")
    made.add_argument("--seed", type=int, default=0, help="seed of the prompts (0)")
    made.add_argument("--json", action="store_true", help="print the figures as JSON")
    return made


def main(arguments: Sequence[str]) -> int:
    """Runs the benchmark and prints the figures. Returns the exit status.

    The status is 1 if a request failed or the server cannot be used.
    """
    options, rest = parsed(parser(), arguments)
    try:
        with opened(options, rest) as target:
            answered = measure(target, options)
    except (ApiError, DoesNotServe, ValueError) as error:
        return give_up(error, ready_fd=None)
    found = figures(answered)
    lines = [json.dumps(found)] if options.json else report(found, options)
    sys.stdout.write("\n".join(lines) + "\n")
    errors = sorted({each.error for each in answered if each.error})
    if errors:
        n_failed = sum(bool(each.error) for each in answered)
        return give_up(f"{n_failed} requests failed: {'; '.join(errors[:3])}", ready_fd=None)
    return 0


def measure(target: Target, options: argparse.Namespace) -> list[Answered]:
    """Sends a warm-up request, and then all requests of the benchmark. Returns the results of all
    requests except the warm-up."""
    vocabulary = sorted(
        set(target.api.post("/tokenize", {"prompt": TEXT, "model": target.model})["tokens"])
    )

    def load(n_requests: int, seed: int) -> Load:
        return Load(
            url=target.api.url,
            model=target.model,
            api_key=target.api_key,
            vocabulary=vocabulary,
            n_users=min(options.users, n_requests),
            n_requests=n_requests,
            n_prompt_tokens=options.prompt_tokens,
            n_output_tokens=options.output_tokens,
            seed=seed,
        )

    asyncio.run(load(1, options.seed - 1).run())
    return asyncio.run(load(options.requests, options.seed).run())


def figures(answered: Sequence[Answered]) -> dict[str, Any]:
    """Computes the figures of a benchmark from the results of its requests.

    Throughput is in tokens and requests per second. Latencies are percentiles in seconds. Failed
    requests are counted but are not part of throughput and latencies.
    """
    good = [each for each in answered if not each.error]
    seconds = max((it.last for it in good), default=0) - min((it.sent for it in good), default=0)
    n_tokens = sum(each.n_tokens for each in good)
    return {
        "n_requests": len(answered),
        "n_failed": len(answered) - len(good),
        "seconds": seconds,
        "output_tokens": n_tokens,
        "tokens_per_s": n_tokens / seconds if seconds else 0.0,
        "requests_per_s": len(good) / seconds if seconds else 0.0,
        "ttft_s": percentiles([each.ttft_s for each in good]),
        "tpot_s": percentiles([it.tpot_s for it in good if it.tpot_s is not None]),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Returns the percentiles in `PERCENTILES` of the values, by the nearest-rank method. The
    result is empty if there are no values."""
    ordered = sorted(values)
    return {f"p{p}": ordered[-(-p * len(ordered) // 100) - 1] for p in PERCENTILES if ordered}


def report(found: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """Returns the figures, `found`, as lines of text for a terminal."""
    lines = [
        f"{found['n_requests'] - found['n_failed']} requests of {options.prompt_tokens} + "
        f"{options.output_tokens} tokens, {options.users} users, {found['seconds']:.1f} s",
        f"throughput  {found['tokens_per_s']:.1f} output tokens/s, "
        f"{found['requests_per_s']:.2f} requests/s",
    ]
    for name, key in (("first token", "ttft_s"), ("per token", "tpot_s")):
        if found[key]:
            values = ", ".join(f"{p} {1000 * s:.1f} ms" for p, s in found[key].items())
            lines.append(f"{name:<11} {values}")
    return lines
