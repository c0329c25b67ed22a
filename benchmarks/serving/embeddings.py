"""Texts per second of an encoder, beside `sentence-transformers` on the same threads.

    python -m benchmarks.peers.install sentence_transformers
    python -m benchmarks.serving.embeddings "$(python -m models.minilm)" --rounds 10

A request has 64 short texts, or 8 long ones. The two engines take turns, and the engine whose turn
it is not is stopped or idle. Orcinus runs as a whole service over HTTP, and its client shares the
processors with it. The peer is called as a library on the same processors. Before the first round,
the embeddings of both engines are compared. The ratio of speeds is the median over pairs of calls,
with its range.
"""

import argparse
import asyncio
import base64
import json
import math
import random
import statistics
import sys
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import uvloop

from benchmarks import local_system, machine
from benchmarks.peers import peer_process
from benchmarks.peers.catalogue import DEFAULT_VENVS, ENCODERS

TIMEOUT_S = 600.0
MIN_COSINE = 0.99999
WORDS = (
    "the a of model text river answer small large cloud giraffe property debt court music light "
    "engine stone window people city time water question number paper green travels holds finds"
)

SHAPES = {"64 short": (64, 12), "8 long": (8, 160)}
"""Number of texts of a request, and number of words of each, by name. A long text has at most 256
tokens, of which the peer reads no more with all-MiniLM-L6-v2."""


def texts_of(shape: str, seed: str) -> list[str]:
    """Returns random texts of a shape, which is a key of `SHAPES`. The number of words of a text
    differs by up to a quarter from the number in `SHAPES`."""
    n_texts, n_words = SHAPES[shape]
    chance, words = random.Random(seed), WORDS.split()
    return [
        " ".join(chance.choices(words, k=chance.randint(3 * n_words // 4, 5 * n_words // 4)))
        for _ in range(n_texts)
    ]


def call(client: httpx.Client, texts: Sequence[str]) -> tuple[float, list["array[float]"]]:
    """Requests the embeddings of texts from our system. Returns the seconds until the embeddings
    are parsed, and the embeddings. Raises RuntimeError if the system refuses."""
    start_s = time.perf_counter()
    answer = client.post("/v1/embeddings", json={"input": texts, "encoding_format": "base64"})
    if answer.status_code != httpx.codes.OK:
        raise RuntimeError(answer.text)
    vectors: list[array[float]] = []
    for item in answer.json()["data"]:
        vector = array("f")
        vector.frombytes(base64.b64decode(item["embedding"]))
        vectors.append(vector)
    return time.perf_counter() - start_s, vectors


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Returns the cosine of the angle between two vectors."""
    product = math.fsum(a * b for a, b in zip(one, other, strict=True))
    return product / (math.hypot(*one) * math.hypot(*other))


def measure(
    client: httpx.Client, peer: peer_process.PeerProcess, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Measures all shapes. Returns the seconds of each round by shape and engine. Raises
    RuntimeError if the embeddings of the two engines differ."""
    seconds: dict[str, dict[str, list[float]]] = {}
    for shape in SHAPES:
        texts = texts_of(shape, "first")
        _, own = call(client, texts)
        _, others = peer.encode(texts)
        least = min(map(cosine, own, others))
        if least < MIN_COSINE:
            raise RuntimeError(f"{shape}: vectors differ, the cosine of a pair is {least}")
        found: dict[str, list[float]] = {"ours": [], "peer": []}
        for number in range(rounds):
            texts = texts_of(shape, f"{number}")
            for engine in ("ours", "peer") if number % 2 == 0 else ("peer", "ours"):
                ask = call(client, texts) if engine == "ours" else peer.encode(texts)
                found[engine].append(ask[0])
        seconds[shape] = found
    return seconds


def summary(shape: str, found: dict[str, list[float]]) -> dict[str, Any]:
    """Returns the texts per second of both engines, as medians, and the ratio of their speeds."""
    n_texts = SHAPES[shape][0]
    ratios = [peer / own for own, peer in zip(found["ours"], found["peer"], strict=True)]
    return {
        "texts": shape,
        "ours_per_s": round(n_texts / statistics.median(found["ours"]), 1),
        "peer_per_s": round(n_texts / statistics.median(found["peer"]), 1),
        "ratio": round(statistics.median(ratios), 3),
        "range": [round(min(ratios), 3), round(max(ratios), 3)],
    }


async def run(options: argparse.Namespace) -> None:
    """Starts both engines, measures, and prints a line of JSON for each shape."""
    about = {"machine": machine.describe(), "threads": options.threads}
    arguments = [f"--model={options.model}", "--log-level=ERROR", "--dtype=float32"]
    arguments += [f"--threads={options.threads}", *options.system.split()]
    peer = peer_process.start(
        ENCODERS["sentence_transformers"],
        venvs=options.venvs,
        model=options.model,
        dtype="fp32",
        threads=options.threads,
    )
    with peer:
        async with local_system.running(arguments) as system:
            with httpx.Client(base_url=system.http, timeout=TIMEOUT_S) as client:
                seconds = await asyncio.to_thread(measure, client, peer, options.rounds)
    results = [summary(shape, found) for shape, found in seconds.items()]
    for line in ({**about, "peer": peer.about}, *results):
        sys.stdout.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a checkpoint with files of sentence-transformers")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--venvs", type=Path, default=DEFAULT_VENVS, help="where peers are")
    parser.add_argument("--system", default="", help="further options of services.local")
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
