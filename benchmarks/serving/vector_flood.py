"""The pace of running streams beside a flood of requests for embeddings.

    python -m benchmarks.serving.vector_flood MODEL

A whole system on loopback serves a few streams that always run. In each round they run alone for
some seconds, and then beside clients that send texts to `/v1/embeddings` without a pause. The
results are the gaps between two chunks of a stream (the median, and the 99th percentile), and the
prompt tokens of embeddings per second. Rounds alternate between two systems: one with the default
of the scheduler's `vector_share`, and one in which prompts of embeddings may fill batches.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import numpy as np

from benchmarks import local_system
from benchmarks.serving.streams import Streams, ended

TIMEOUT_S = 600.0
UNLIMITED = "--scheduler=vector_share=1000"
SYSTEMS = {"by default": (), "vectors fill batches": (UNLIMITED,)}


class Flood:
    """Clients that request embeddings without a pause."""

    def __init__(self, client: httpx.AsyncClient, *, n_texts: int, n_words: int) -> None:
        self._client = client
        self._texts = [" ".join([f"whale{i}"] * n_words) for i in range(n_texts)]
        self.n_tokens = 0
        """Number of tokens of the texts whose embeddings have been returned."""

    async def run(self) -> None:
        """Sends one list of texts after the other, until cancelled."""
        while True:
            response = await self._client.post("/v1/embeddings", json={"input": self._texts})
            response.raise_for_status()
            self.n_tokens += response.json()["usage"]["prompt_tokens"]


@dataclass(frozen=True, slots=True)
class Round:
    """The measurements of one round: streams alone, then streams beside a flood."""

    alone_s: Sequence[float]
    """Gaps of the streams alone."""
    beside_s: Sequence[float]
    """Gaps of the streams beside the flood."""
    n_vector_tokens_per_s: float
    """Number of tokens of the texts whose embeddings were returned, per second of the flood."""


async def measure_round(client: httpx.AsyncClient, options: argparse.Namespace) -> Round:
    """Measures the streams alone and beside a flood."""
    async with Streams.running(client, options.streams, options.n_tokens) as streams:
        await asyncio.sleep(1.0)  # their prompts
        streams.take()
        await asyncio.sleep(options.seconds)
        alone_s = streams.take()
        flood = Flood(client, n_texts=options.texts, n_words=options.words)
        async with ended([asyncio.create_task(flood.run()) for _ in range(options.flood_clients)]):
            await asyncio.sleep(options.settle_s)
            streams.take()
            begin, n_before = time.perf_counter(), flood.n_tokens
            await asyncio.sleep(options.seconds)
            beside_s, took_s = streams.take(), time.perf_counter() - begin
    return Round(alone_s, beside_s, (flood.n_tokens - n_before) / took_s)


async def measure(options: argparse.Namespace) -> None:
    """Measures the two systems in alternating rounds, and prints the results."""
    rounds: dict[str, list[Round]] = {title: [] for title in SYSTEMS}
    for number in range(options.rounds):
        for title, arguments in SYSTEMS.items():
            every = (f"--model={options.model}", "--pooling=mean", "--log-level=ERROR")
            async with (
                local_system.running((*every, *arguments)) as system,
                httpx.AsyncClient(base_url=system.http, timeout=TIMEOUT_S) as client,
            ):
                rounds[title].append(await measure_round(client, options))
            print(f"round {number + 1}, {title}: {_line([rounds[title][-1]])}", flush=True)
    for title, all_rounds in rounds.items():
        print(f"{title}: {_line(all_rounds)}")


def _line(rounds: Sequence[Round]) -> str:
    """Returns the medians over all rounds as text: of the gaps alone and beside the flood in
    milliseconds, of their ratios, and of the embedded tokens per second."""
    found = []
    for share in (50, 99):
        alone = [1e3 * float(np.percentile(one.alone_s, share)) for one in rounds]
        beside = [1e3 * float(np.percentile(one.beside_s, share)) for one in rounds]
        ratio = statistics.median(b / a for a, b in zip(alone, beside, strict=True))
        found.append(
            f"p{share} {statistics.median(alone):.1f} -> {statistics.median(beside):.1f} ms "
            f"({ratio:.2f} x)"
        )
    rate = statistics.median(one.n_vector_tokens_per_s for one in rounds)
    return f"gaps {', '.join(found)}; {rate:.0f} tokens of vectors a second"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a checkpoint that generates, such as models/demo")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--n-tokens", type=int, default=200, help="tokens of each stream")
    parser.add_argument("--flood-clients", type=int, default=8)
    parser.add_argument("--texts", type=int, default=4, help="texts of each request for vectors")
    parser.add_argument("--words", type=int, default=12, help="words of each text")
    parser.add_argument("--seconds", type=float, default=15.0, help="length of each measurement")
    parser.add_argument("--settle-s", type=float, default=8.0, help="time before a flood counts")
    parser.add_argument("--rounds", type=int, default=3)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
