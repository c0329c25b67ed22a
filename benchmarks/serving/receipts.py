"""The cost of receipts: throughput with receipts beside throughput without, and the time that
`orcinus verify` takes.

    python -m benchmarks.serving.receipts
    python -m benchmarks.serving.receipts build/llama-125m --rounds 10 --requests 256

One system on loopback serves rounds of requests that arrive all at once. In every second round each
request asks for a receipt. The ratio is the median over pairs of rounds, with its 95 % interval by
resampling. Then `orcinus verify` starts a system of its own and computes all answers with receipts
again; its time includes the start.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import uvloop

from benchmarks import local_system, machine
from services.receipts.keys import new_key

TIMEOUT_S = 600.0
FIRST_TOKEN_ID, VOCAB_SIZE = 4, 300
N_RESAMPLES = 10_000


def bodies(options: argparse.Namespace, number: int) -> list[dict[str, Any]]:
    """Returns the bodies of the requests of the round with a number, with prompts of random tokens.
    Every answer has `options.tokens` tokens."""
    chance = random.Random(f"{options.seed} {number}")
    return [
        {
            "prompt": [
                chance.randrange(FIRST_TOKEN_ID, VOCAB_SIZE) for _ in range(options.n_prompt)
            ],
            "max_tokens": options.tokens,
            "ignore_eos": True,
            "temperature": 0.8,
            "seed": index,
        }
        for index in range(options.requests)
    ]


async def round_of(
    client: httpx.AsyncClient, requests: Sequence[dict[str, Any]], *, receipts: bool
) -> tuple[float, list[str]]:
    """Serves one round of requests. Returns its throughput in tokens per second, and the answers as
    JSON texts. `receipts` says whether each request asks for a receipt."""

    async def ask(body: dict[str, Any]) -> str:
        answer = await client.post("/v1/completions", json={**body, "receipt": receipts})
        if answer.status_code != httpx.codes.OK:
            raise RuntimeError(answer.text)
        return answer.text

    start_s = time.perf_counter()
    answers = await asyncio.gather(*(ask(body) for body in requests))
    seconds = time.perf_counter() - start_s
    return sum(body["max_tokens"] for body in requests) / seconds, answers


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % interval of the median of ratios, by resampling."""
    chance = random.Random(0)
    medians = sorted(
        statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(N_RESAMPLES)
    )
    return medians[N_RESAMPLES // 40], medians[-N_RESAMPLES // 40]


async def verify(options: argparse.Namespace, answers: Sequence[str], scratch: Path) -> float:
    """Runs `orcinus verify` on the receipts of answers. Returns the seconds that the command took.

    Raises:
        RuntimeError: the command failed, or a receipt is wrong or could not be checked.
    """
    path = scratch / "answers.jsonl"
    path.write_text("".join(json.dumps(json.loads(text)) + "\n" for text in answers))
    start_s = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli", "verify", str(path), f"--model={options.model}"),
        stdout=asyncio.subprocess.PIPE,
    )
    printed, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(printed.decode())
    return time.perf_counter() - start_s


async def run(options: argparse.Namespace) -> None:
    """Runs all rounds, verifies the receipts, and prints the results."""
    ratios: list[float] = []
    signed: list[str] = []
    limits = httpx.Limits(max_connections=options.requests)
    with TemporaryDirectory() as directory:
        scratch = Path(directory)
        (scratch / "keys.pem").write_bytes(new_key())
        arguments = [f"--model={options.model}", "--log-level=ERROR", "--receipts=on_request"]
        arguments += [f"--receipt-keys-file={scratch / 'keys.pem'}", *options.system.split()]
        async with (
            local_system.running(arguments) as system,
            httpx.AsyncClient(base_url=system.http, timeout=TIMEOUT_S, limits=limits) as client,
        ):
            await round_of(client, bodies(options, -1), receipts=True)  # sets up connections
            for number in range(options.rounds):
                rates = {}
                for receipts in (False, True) if number % 2 == 0 else (True, False):
                    requests = bodies(options, 2 * number + receipts)  # none is cached
                    rates[receipts], answers = await round_of(client, requests, receipts=receipts)
                    signed += answers if receipts else []
                ratios.append(rates[True] / rates[False])
                print_line(
                    f"{rates[False]:8.0f} tokens/s without receipts, {rates[True]:8.0f} with them"
                )
        seconds = await verify(options, signed, scratch)
    low, high = interval(ratios)
    print_line(f"throughput with receipts {statistics.median(ratios):.3f} x ({low:.3f}-{high:.3f})")
    n_bytes = statistics.mean(map(receipt_bytes, signed))
    print_line(f"a receipt has {n_bytes:.0f} bytes")
    print_line(f"orcinus verify: {len(signed)} receipts of {options.tokens} tokens {seconds:.1f} s")
    if options.json is not None:
        record = {
            **machine.describe(),
            "ratios": [round(ratio, 4) for ratio in ratios],
            "n_verified": len(signed),
            "receipt_bytes": round(n_bytes),
            "verify_s": round(seconds, 1),
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def receipt_bytes(answer: str) -> int:
    """Returns the number of bytes of the receipt in an answer, as compact JSON."""
    [choice] = json.loads(answer)["choices"]
    return len(json.dumps(choice["receipt"], separators=(",", ":")))


def print_line(text: str) -> None:
    """Prints a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    """Reads the options and runs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="models/demo")
    parser.add_argument("--rounds", type=int, default=10, help="pairs of rounds (10)")
    parser.add_argument("--requests", type=int, default=100, help="of each round (100)")
    parser.add_argument("--n-prompt", type=int, default=32, help="tokens of each prompt (32)")
    parser.add_argument("--tokens", type=int, default=100, help="tokens of each answer (100)")
    parser.add_argument("--system", default="", help="more options of services.local")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record")
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
