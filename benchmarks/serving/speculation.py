"""The gain of speculation: the same prompts with drafts and without, in turns.

    python -m benchmarks.serving.speculation ~/.cache/orcinus/smollm2-135m-instruct

Two whole systems on loopback serve the same checkpoint, one of them with `speculative_tokens=0`.
Each task is given to one system and then to the other, so that other work on the machine affects
both. There are three kinds of tasks: texts to summarise and code to edit, whose answers repeat much
of the prompt, and questions whose answers repeat nothing. Answers are greedy or seeded, and must be
equal in both systems.

Prints tokens per second. For one user, the time counts from the first token on. For many users at
once, all tokens are divided by the whole time. The ratios are medians over the pairs, with
quartiles. `--json` writes the records.
"""

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import uvloop

from benchmarks import local_system, machine
from benchmarks.serving.speculation_prompts import KINDS

TIMEOUT_S = 1200.0


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, and the seconds from its first token to its last."""

    text: str
    n_tokens: int
    decode_s: float


@dataclass(frozen=True, slots=True)
class Pair:
    """One measurement without drafts and one with drafts, in tokens per second."""

    kind: str
    n_users: int
    without: float
    with_drafts: float

    @property
    def ratio(self) -> float:
        """Tokens per second with drafts, divided by tokens per second without."""
        return self.with_drafts / self.without


async def ask(client: httpx.AsyncClient, prompt: str, options: argparse.Namespace) -> Answer:
    """Streams the answer to a prompt and returns it."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": options.n_answer,
        "temperature": options.temperature,
        "seed": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    clock = asyncio.get_running_loop().time
    times, text, n_tokens = [], "", 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != httpx.codes.OK:
            raise RuntimeError((await answer.aread()).decode())
        async for line in answer.aiter_lines():
            data = line.removeprefix("data: ")
            if not line.startswith("data: ") or data == "[DONE]":
                continue
            times.append(clock())
            event = json.loads(data)
            if usage := event.get("usage"):
                n_tokens = usage["completion_tokens"]
            for choice in event.get("choices", ()):
                text += choice["delta"].get("content") or ""
    return Answer(text, n_tokens, times[-1] - times[0])


async def together(
    client: httpx.AsyncClient, prompts: Sequence[str], options: argparse.Namespace
) -> tuple[list[Answer], float]:
    """Sends all prompts at once. Returns the answers, and the seconds until the last answer is
    complete."""
    clock = asyncio.get_running_loop().time
    start = clock()
    answers = await asyncio.gather(*(ask(client, prompt, options) for prompt in prompts))
    return list(answers), clock() - start


def check_same(first: Sequence[Answer], second: Sequence[Answer]) -> None:
    """Checks that the answers of both systems are equal. Raises RuntimeError if two answers to one
    prompt differ."""
    for one, other in zip(first, second, strict=True):
        if one.text != other.text or one.n_tokens != other.n_tokens:
            raise RuntimeError(f"answers differ:\n{one.text}\n---\n{other.text}")


async def measure(
    without: httpx.AsyncClient, with_drafts: httpx.AsyncClient, options: argparse.Namespace
) -> list[Pair]:
    """Gives all tasks to both systems, and returns the measured pairs."""
    clients, pairs = (without, with_drafts), []
    kinds = {kind: prompts for kind, prompts in KINDS.items() if kind in options.kinds}
    for client in clients:
        await ask(client, "Hello!", options)
    for round_number in range(options.rounds):
        in_order = clients if round_number % 2 == 0 else clients[::-1]
        for kind, prompts in kinds.items():
            for prompt in prompts:
                got = {client: await ask(client, prompt, options) for client in in_order}
                a, b = (got[client] for client in clients)
                check_same([a], [b])
                if a.n_tokens > 1:
                    rates = ((one.n_tokens - 1) / one.decode_s for one in (a, b))
                    pairs.append(Pair(kind, 1, *rates))
        for kind, prompts in kinds.items():
            asked = [f"{prompts[user % len(prompts)]}\n\n{user}" for user in range(options.users)]
            if not asked:
                continue
            of = {client: await together(client, asked, options) for client in in_order}
            (first, first_s), (second, second_s) = (of[client] for client in clients)
            check_same(first, second)
            n_tokens = sum(answer.n_tokens for answer in first)
            pairs.append(Pair(kind, options.users, n_tokens / first_s, n_tokens / second_s))
    return pairs


def report(pairs: Sequence[Pair]) -> list[str]:
    """Returns the results as lines of text to print."""
    lines = []
    for n_users, kind in dict.fromkeys((pair.n_users, pair.kind) for pair in pairs):
        some = [pair for pair in pairs if (pair.n_users, pair.kind) == (n_users, kind)]
        ratios = sorted(pair.ratio for pair in some)
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        lines.append(
            f"{n_users:3} users, {kind:10}: "
            f"{statistics.median(pair.without for pair in some):7.1f} tokens/s without, "
            f"{statistics.median(pair.with_drafts for pair in some):7.1f} with; "
            f"ratio {statistics.median(ratios):.2f} ({low:.2f} to {high:.2f}, {len(some)} pairs)"
        )
    return lines


async def run(options: argparse.Namespace) -> list[Pair]:
    """Starts both systems, gives all tasks to both, and returns the measured pairs."""
    arguments = [f"--model={options.model}", "--log-level=ERROR", *options.system.split()]
    if options.users:
        arguments.append(f"--max-batch-size={options.users}")
    limits = httpx.Limits(max_connections=max(1, options.users))
    async with (
        local_system.running([*arguments, "--scheduler=speculative-tokens=0"]) as plain,
        local_system.running(arguments) as drafting,
        httpx.AsyncClient(base_url=plain.http, timeout=TIMEOUT_S, limits=limits) as without,
        httpx.AsyncClient(base_url=drafting.http, timeout=TIMEOUT_S, limits=limits) as with_drafts,
    ):
        return await measure(without, with_drafts, options)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line, runs the benchmark, prints the results, and writes the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--users", type=int, default=64, help="users at once; 0 leaves them out")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--n-answer", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--system", default="", help="further arguments of services.local")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    pairs = uvloop.run(run(options))
    sys.stdout.write("\n".join(report(pairs)) + "\n")
    if options.json is not None:
        write(options.json, options, pairs)


def write(path: Path, options: argparse.Namespace, pairs: Sequence[Pair]) -> None:
    """Writes a JSON record with the pairs, the machine and the settings."""
    settings: Mapping[str, object] = {key: str(value) for key, value in vars(options).items()}
    record = {
        "machine": machine.describe(),
        "settings": settings,
        "pairs": [asdict(pair) | {"ratio": pair.ratio} for pair in pairs],
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
