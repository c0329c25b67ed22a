"""Sends load to a running server, and measures latency and throughput at the client.

    python -m benchmarks.serving.serve --url http://127.0.0.1:8000              all at once
    python -m benchmarks.serving.serve --url http://127.0.0.1:8000 --rates 1,2,4        open loop
    python -m benchmarks.serving.serve --grpc 127.0.0.1:50051                   Orcinus' own API

Works with any server with the OpenAI API. Requests are sent when they are due, even if the server
is too slow. The fields `ignore_eos` and `min_tokens`, which Orcinus, vLLM and SGLang support, make
every output exactly as long as in the workload. `--body` sets other fields; null removes a field.
Prompts are token ids; for a server that accepts only texts, `--tokenizer tokenizer.json` decodes
them.

Writes a record of every request as JSON and, for several rates, a figure. Prints the client's own
processor time, since a client on the server's machine takes processor time from the server.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

import grpc.aio
import tokenizers
import uvloop
from tqdm import tqdm

from benchmarks import cpu_use, machine, records, workload
from benchmarks.plots import Point, draw_latency
from benchmarks.records import RunRecord, Spread
from benchmarks.serving import load
from benchmarks.serving.grpc_client import GrpcClient
from benchmarks.serving.openai_client import OpenAIClient
from benchmarks.workload import PlannedRequest

Prompts = dict[tuple[int, ...], str]

COLUMNS = (
    f"{'rate':>8} {'req/s':>7} {'tokens/s':>9} {'normalised ms':>17} {'first token ms':>17} "
    f"{'gap ms':>15} {'goodput':>8} {'failed':>7}"
)
"""Header line of the table. A column of two numbers has the median and the 99th percentile."""


async def measure(
    client: load.Client,
    requests: Sequence[PlannedRequest],
    *,
    meta: Mapping[str, Any],
    timeout_s: float = 600.0,
    engine: int | None = None,
    title: str = "",
) -> RunRecord:
    """Sends the requests of one run and returns its record. `engine` is the id of the server's
    process, if the server runs on this machine; then the record has the use of processors."""
    with (
        tqdm(total=len(requests), desc=title, unit="request", leave=False) as bar,
        cpu_use.watch(engine) as use,
    ):
        cpu_s = time.process_time()
        done = await load.run(client, requests, timeout_s=timeout_s, on_done=bar.update)
        cpu_s = time.process_time() - cpu_s
    n_tokens = sum(record.n_output for record in done)
    return RunRecord(
        {
            **meta,
            "own_cpus": round(use.own_cpus, 3),
            "other_cpus": round(use.other_cpus, 3),
            "client_us_per_token": round(1e6 * cpu_s / max(1, n_tokens), 1),
            "client_lag_s": round(max(record.start_s - record.arrival_s for record in done), 6),
        },
        tuple(done),
    )


async def warm_up(client: load.Client, requests: Sequence[PlannedRequest]) -> None:
    """Sends requests to warm up the server, and ignores their times.

    Raises:
        RuntimeError: a request failed; the message has the error.
    """
    for record in await load.run(client, requests):
        if record.error is not None:
            raise RuntimeError(f"a request to warm up failed: {record.error}")


def row(rate: float | None, run: RunRecord, *, bound_s: float | None) -> str:
    """Returns the line of the table for a run, with the columns of `COLUMNS`."""
    summary = run.summary(bound_s=bound_s)
    return (
        f"{'at once' if rate is None else f'{rate:g}':>8} {summary.requests_per_s:>7.2f} "
        f"{summary.output_tokens_per_s:>9.1f} {_pair(summary.normalised_latency_s):>17} "
        f"{_pair(summary.time_to_first_token_s):>17} {_pair(summary.gap_s):>15} "
        f"{'-' if summary.goodput_per_s is None else f'{summary.goodput_per_s:.2f}':>8} "
        f"{summary.n_failed:>7}"
    )


def point(run: RunRecord) -> Point | None:
    """Returns the point of a run in the plot; None if no request was answered."""
    summary = run.summary()
    latency = summary.normalised_latency_s
    return None if latency is None else Point(summary.requests_per_s, latency.median)


def _pair(spread: Spread | None) -> str:
    return "-" if spread is None else f"{1e3 * spread.median:.1f} {1e3 * spread.p99:.1f}"


@contextlib.asynccontextmanager
async def client_of(
    options: argparse.Namespace, prompts: Prompts | None
) -> AsyncIterator[load.Client]:
    """Yields the client for the protocol that the options name."""
    if options.grpc is not None:
        async with grpc.aio.insecure_channel(options.grpc) as channel:
            yield GrpcClient(channel)
    else:
        key = options.api_key
        yield OpenAIClient(
            options.url,
            model=options.model or await asyncio.to_thread(first_model, options.url, api_key=key),
            body=options.body,
            api_key=key,
            prompts=prompts,
        )


def first_model(url: str, *, api_key: str | None = None) -> str:
    """Returns the name of the first model that the server at `url` lists.

    Raises:
        RuntimeError: the server lists no model.
    """
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(f"{url.rstrip('/')}/v1/models", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return str(json.load(response)["data"][0]["id"])
    except (OSError, HTTPException, ValueError, LookupError) as error:
        raise RuntimeError(f"{url} lists no models ({error}); name one with --model") from error


def texts_of(path: Path, runs: Sequence[Sequence[PlannedRequest]]) -> Prompts:
    """Decodes all prompts with the tokenizer file `path`, and returns the texts by token ids."""
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    prompts = {request.prompt_token_ids for requests in runs for request in requests}
    return {prompt: tokenizer.decode(list(prompt)) for prompt in prompts}


async def run(options: argparse.Namespace) -> int:
    """Runs all measurements that the options name. The exit status is 1 if a request failed."""
    rates: list[float | None] = options.rates or [None]
    runs = [
        workload.from_options(options, rate=rate, vocab_size=options.vocab_size, run=index)
        for index, rate in enumerate(rates)
    ]
    first = workload.rehearsal(runs[0], n_requests=options.warm_up, n_output=8)
    prompts = None if options.tokenizer is None else texts_of(options.tokenizer, [*runs, first])
    meta = {**machine.describe(), "seed": options.seed, "tag": options.tag}
    results: list[RunRecord] = []
    async with client_of(options, prompts) as client:
        await warm_up(client, first)
        print(COLUMNS)
        for rate, requests in zip(rates, runs, strict=True):
            results.append(
                await measure(
                    client,
                    requests,
                    meta={**meta, "rate": rate},
                    timeout_s=options.timeout_s,
                    engine=options.server_pid,
                    title="at once" if rate is None else f"{rate:g} requests/s",
                )
            )
            print(row(rate, results[-1], bound_s=options.bound_s), flush=True)
    report(results, options)
    return int(any(record.error for result in results for record in result.requests))


def report(results: Sequence[RunRecord], options: argparse.Namespace) -> None:
    """Prints errors and the client's processor time, and writes the record and the figure."""
    errors = {record.error for result in results for record in result.requests} - {None}
    for error in sorted(filter(None, errors))[:5]:
        print(f"failed: {error}")
    n_tokens = sum(record.n_output for result in results for record in result.requests)
    own_s = sum(
        1e-6 * result.meta["client_us_per_token"] * sum(r.n_output for r in result.requests)
        for result in results
    )
    print(
        f"client: {1e6 * own_s / max(1, n_tokens):.0f} us of processor time per token, at most "
        f"{1e3 * max(result.meta['client_lag_s'] for result in results):.1f} ms late"
    )
    if options.out is None:
        return
    records.write(options.out, results)
    print(f"wrote {options.out}")
    points = [found for result in results if (found := point(result)) is not None]
    if len(points) > 1:
        draw_latency(
            options.out.with_suffix(".png"),
            {options.tag or "server": points},
            title=f"{options.requests} requests at each rate",
            bound_s=options.bound_s,
        )
        print(f"wrote {options.out.with_suffix('.png')}")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="of a server with the OpenAI API, http://host:port")
    where.add_argument("--grpc", metavar="HOST:PORT", help="of an Orcinus frontend")
    parser.add_argument("--model", help="the model's name there (default: the first it lists)")
    parser.add_argument("--api-key")
    parser.add_argument("--body", type=json.loads, help="JSON object of fields for each request")
    parser.add_argument("--tokenizer", type=Path, help="send texts, made with this tokenizer.json")
    parser.add_argument(
        "--vocab-size", type=int, default=32000, metavar="N", help="prompts are of ids below this"
    )
    parser.add_argument(
        "--rates",
        type=lambda text: [float(rate) for rate in text.split(",")],
        metavar="R,R",
        help="requests a second, a run for each (default: one run, all at once)",
    )
    parser.add_argument(
        "--bound-s",
        type=float,
        metavar="S",
        help="goodput counts requests of at most this normalised latency, in seconds per token",
    )
    parser.add_argument("--timeout-s", type=float, default=600.0, help="of one request")
    parser.add_argument("--warm-up", type=int, default=4, metavar="N", help="requests before")
    parser.add_argument("--server-pid", type=int, help="to tell its processor time from others'")
    parser.add_argument("--tag", default="", help="a name for the server, in files")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON; a PNG goes beside it")
    workload.add_options(parser)
    return parser.parse_args(arguments)


def main() -> int:
    options = parse(sys.argv[1:])
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run(options))
    except (RuntimeError, ValueError) as error:
        print(f"benchmarks.serving.serve: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
