"""The gain of the prefix cache: a chat of several turns, with the cache off and on.

    python -m benchmarks.make_model /tmp/llama-125m
    python -m benchmarks.serving.prefix_cache /tmp/llama-125m
    python -m benchmarks.peers.install vllm
    python -m benchmarks.serving.prefix_cache /tmp/llama-125m --peers vllm --rounds 3
    python -m benchmarks.serving.prefix_cache /tmp/llama-125m --peers vllm --rounds 3 --think-s 1

All users share a system prompt, and each user asks questions one after the other: the prompt of a
turn is the whole conversation so far, with the new question. Without thinking time (`--think-s`),
users whose answers end together also ask their next questions together, which decides the waiting
times. Whole systems on loopback serve the same chat over HTTP in turns, one without the cache and
one with it. Prompts are token ids, so that their lengths are exact. Answers are greedy and of one
length, and must have the same tokens in all runs.

A peer is another engine, stepped in its own process, without a server. It runs without and with its
own prefix cache. The users of a peer ask the same questions. The answers of a peer have the same
length, but may have other tokens.

Prints the time to the first token from the second turn on, where the cache holds the conversation
so far, and the throughput of the whole chat. The ratios are medians over the rounds. `--json`
writes the records, `--png` draws the time to the first token by turn.
"""

import argparse
import asyncio
import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import uvloop
from matplotlib.figure import Figure

from benchmarks import local_system, machine, records
from benchmarks.peers import peer_process
from benchmarks.peers.catalogue import DEFAULT_VENVS, PEERS
from benchmarks.peers.contestants import OUR_DTYPES, OURS
from benchmarks.records import RequestRecord, RunRecord, Spread
from benchmarks.workload import PlannedRequest

TIMEOUT_S = 600.0
FIRST_TOKEN_ID, VOCAB_SIZE = 3, 1000
"""First token id of prompts, and the end of their range. Every model has these tokens, and none of
them is special."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a user: the tokens and the record of the answer."""

    user: int
    turn: int
    token_ids: tuple[int, ...]
    n_cached: int
    record: RequestRecord


@dataclass(frozen=True, slots=True)
class Chat:
    """One run of the whole chat on one engine."""

    has_cache: bool
    turns: tuple[Turn, ...]
    engine: str = OURS

    @property
    def answers(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """The tokens of each answer, by user and turn."""
        return {(turn.user, turn.turn): turn.token_ids for turn in self.turns}

    @property
    def n_cached(self) -> int:
        """Number of prompt tokens, over all turns, that were found in the prefix cache."""
        return sum(turn.n_cached for turn in self.turns)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second over the whole chat."""
        end_s = max(turn.record.end_s for turn in self.turns)
        return sum(len(turn.token_ids) for turn in self.turns) / end_s

    def first_token_s(self, turns: Sequence[int]) -> Spread:
        """Returns the spread of the seconds to the first token, over all users and the turns with
        the given numbers."""
        times = (turn.record.time_to_first_token_s for turn in self.turns if turn.turn in turns)
        spread = Spread.of(time_s for time_s in times if time_s is not None)
        if spread is None:
            raise RuntimeError("no answer has a token")
        return spread


def pauses(options: argparse.Namespace) -> list[list[float]]:
    """Returns the seconds for which each user thinks before each question, [users][turns]."""
    draw = np.random.default_rng([options.seed, 1]).exponential
    drawn: list[list[float]] = draw(options.think_s, (options.users, options.turns)).tolist()
    return drawn


def questions(options: argparse.Namespace) -> tuple[list[int], list[list[list[int]]]]:
    """Returns the tokens of the system prompt, and the tokens of each question, [users][turns]."""
    draw = np.random.default_rng(options.seed).integers

    def tokens(n_tokens: int) -> list[int]:
        drawn: list[int] = draw(FIRST_TOKEN_ID, VOCAB_SIZE, n_tokens).tolist()
        return drawn

    of_users = [
        [tokens(options.n_question) for _ in range(options.turns)] for _ in range(options.users)
    ]
    return tokens(options.n_system), of_users


async def ask(client: httpx.AsyncClient, prompt: list[int], n_answer: int, zero_s: float) -> Turn:
    """Streams the answer to a prompt and returns it as a turn. Times are seconds since `zero_s`, a
    time of the event loop."""
    body = {
        "prompt": prompt,
        "max_tokens": n_answer,
        "min_tokens": n_answer,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    clock = asyncio.get_running_loop().time
    start_s, times, token_ids, n_cached = clock() - zero_s, [], [], 0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != httpx.codes.OK:
            raise RuntimeError((await answer.aread()).decode())
        async for line in answer.aiter_lines():
            now_s = clock() - zero_s
            data = line.removeprefix("data: ")
            if not line.startswith("data: ") or data == "[DONE]":
                continue
            event = json.loads(data)
            if usage := event.get("usage"):
                n_cached = usage["prompt_tokens_details"]["cached_tokens"]
            for choice in event.get("choices", ()):
                token_ids += choice["token_ids"]
                times += [now_s] * len(choice["token_ids"])
    if len(token_ids) != n_answer:
        raise RuntimeError(f"an answer has {len(token_ids)} tokens instead of {n_answer}")
    record = RequestRecord(
        arrival_s=start_s,
        start_s=start_s,
        first_token_s=times[0],
        end_s=times[-1],
        n_prompt=len(prompt),
        n_output=n_answer,
        token_times_s=tuple(times),
    )
    return Turn(0, 0, tuple(token_ids), n_cached, record)


async def chat(client: httpx.AsyncClient, options: argparse.Namespace, *, has_cache: bool) -> Chat:
    """Runs the chat of all users. Each user asks a question, waits for the answer, and thinks
    before the next question."""
    system, of_users = questions(options)
    thinks = pauses(options)
    zero_s = asyncio.get_running_loop().time()

    async def use(user: int) -> list[Turn]:
        said, turns = list(system), []
        for number, question in enumerate(of_users[user], start=1):
            await asyncio.sleep(thinks[user][number - 1])
            said += question
            answer = await ask(client, said, options.n_answer, zero_s)
            said += answer.token_ids
            turns.append(Turn(user, number, answer.token_ids, answer.n_cached, answer.record))
        return turns

    of_all = await asyncio.gather(*(use(user) for user in range(options.users)))
    return Chat(has_cache, tuple(turn for turns in of_all for turn in turns))


async def serve(options: argparse.Namespace, *, has_cache: bool) -> Chat:
    """Starts a system and runs the chat with it."""
    arguments = [f"--model={options.model}", f"--dtype={OUR_DTYPES[options.dtype]}"]
    arguments += ["--log-level=ERROR", *options.system.split()]
    arguments.append("--prefix-cache" if has_cache else "--no-prefix-cache")
    limits = httpx.Limits(max_connections=options.users)
    async with (
        local_system.running(arguments) as system,
        httpx.AsyncClient(base_url=system.http, timeout=TIMEOUT_S, limits=limits) as client,
    ):
        await ask(client, [FIRST_TOKEN_ID] * options.n_system, options.n_answer, 0.0)
        return await chat(client, options, has_cache=has_cache)


def planned(options: argparse.Namespace) -> list[PlannedRequest]:
    """Returns all turns as requests for a peer, one user after the other. Each turn but a user's
    first follows the turn before."""
    system, of_users = questions(options)
    thinks = pauses(options)
    requests: list[PlannedRequest] = []
    for user in range(options.users):
        for number, question in enumerate(of_users[user]):
            said = question if number else [*system, *question]
            follows = len(requests) - 1 if number else None
            pause_s = thinks[user][number]
            requests.append(PlannedRequest(pause_s, tuple(said), options.n_answer, follows=follows))
    return requests


async def serve_by_peer(options: argparse.Namespace, name: str, *, has_cache: bool) -> Chat:
    """Starts the peer `name` in a new process and runs the chat with it."""
    arguments = [f"--max-model-len={options.max_model_len}"]
    arguments += ["--prefix-cache"] if has_cache else []
    process = await asyncio.to_thread(
        peer_process.start,
        PEERS[name],
        venvs=options.venvs,
        model=Path(options.model),
        dtype=options.dtype,
        threads=options.threads,
        options=arguments,
    )
    with process as peer:
        warm_up = PlannedRequest(0.0, (FIRST_TOKEN_ID,) * options.n_system, options.n_answer)
        await asyncio.to_thread(peer.run, [warm_up])
        done, token_ids = await asyncio.to_thread(peer.run, planned(options))
    turns = []
    for index, (record, tokens) in enumerate(zip(done, token_ids, strict=True)):
        user, number = divmod(index, options.turns)
        turns.append(Turn(user, number + 1, tuple(tokens), 0, record))
    return Chat(has_cache, tuple(turns), name)


def line_of(one: Chat, n_turns: int) -> str:
    """Returns the results of one chat as a line of text."""
    first = one.first_token_s(range(2, n_turns + 1))
    cached = f"; {one.n_cached} prompt tokens cached" if one.engine == OURS else ""
    return (
        f"{one.engine}, cache {'on ' if one.has_cache else 'off'}: first token from turn 2 on "
        f"{1e3 * first.median:7.1f} ms, p99 {1e3 * first.p99:7.1f} ms; "
        f"{one.tokens_per_s:7.1f} tokens/s{cached}"
    )


def report(chats: Sequence[Chat], n_turns: int) -> list[str]:
    """Returns the comparison of the chats as lines of text to print.

    Raises:
        RuntimeError: our answers with and without the cache differ, or the cache was never used.
    """
    ours = [one for one in chats if one.engine == OURS]
    if any(one.answers != ours[0].answers for one in ours):
        raise RuntimeError("answers with and without the cache differ")
    later, lines = range(2, n_turns + 1), []
    off = [one for one in ours if not one.has_cache]
    on = [one for one in ours if one.has_cache]
    if not all(one.n_cached for one in on):
        raise RuntimeError("the cache had nothing")
    faster, more = ratios(off, on, later)
    lines.append(f"first token {faster:.2f} x sooner, throughput {more:.2f} x, same tokens")
    for peer in dict.fromkeys(one.engine for one in chats if one.engine != OURS):
        for has_cache, mine in ((False, off), (True, on)):
            theirs = [one for one in chats if (one.engine, one.has_cache) == (peer, has_cache)]
            faster, more = ratios(theirs, mine, later)
            lines.append(
                f"ours to {peer}, cache {'on' if has_cache else 'off'}: first token {faster:.2f} x "
                f"sooner, throughput {more:.2f} x"
            )
    return lines


def ratios(
    before: Sequence[Chat], after: Sequence[Chat], turns: Sequence[int]
) -> tuple[float, float]:
    """Returns two ratios between two kinds of chats, as medians over the rounds: the times to the
    first token in the given turns (`before` / `after`), and the throughputs (`after` /
    `before`)."""
    pairs = list(zip(before, after, strict=True))
    return (
        statistics.median(
            one.first_token_s(turns).median / other.first_token_s(turns).median
            for one, other in pairs
        ),
        statistics.median(other.tokens_per_s / one.tokens_per_s for one, other in pairs),
    )


def draw(path: Path, chats: Sequence[Chat], n_turns: int) -> None:
    """Draws the median time to the first token of each turn, with a line for each run."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    engines = list(dict.fromkeys(one.engine for one in chats))
    labelled: set[str] = set()
    for one in chats:
        label = f"{one.engine}, cache {'on' if one.has_cache else 'off'}"
        axes.plot(
            range(1, n_turns + 1),
            [1e3 * one.first_token_s([turn]).median for turn in range(1, n_turns + 1)],
            color="C1" if one.has_cache else "C0",
            linestyle=("-", ":", "--")[engines.index(one.engine) % 3],
            marker="o",
            label=None if label in labelled else label,
        )
        labelled.add(label)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("turn of the chat")
    axes.set_ylabel("median time to the first token (ms)")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


async def run(options: argparse.Namespace) -> None:
    """Runs all rounds and prints the results."""
    chats: list[Chat] = []
    kinds = [(name, has_cache) for name in (OURS, *options.peers) for has_cache in (False, True)]
    for number in range(options.rounds):
        for name, has_cache in kinds[:: -1 if number % 2 else 1]:
            if name == OURS:
                chats.append(await serve(options, has_cache=has_cache))
            else:
                chats.append(await serve_by_peer(options, name, has_cache=has_cache))
            sys.stdout.write(line_of(chats[-1], options.turns) + "\n")
            sys.stdout.flush()
    sys.stdout.write("\n".join(report(chats, options.turns)) + "\n")
    if options.json is not None:
        meta = machine.describe()
        records.write(
            options.json,
            [
                RunRecord(
                    {
                        **meta,
                        "engine": one.engine,
                        "prefix_cache": one.has_cache,
                        "n_cached": one.n_cached,
                    },
                    tuple(dataclasses.replace(turn.record, token_times_s=()) for turn in one.turns),
                )
                for one in chats
            ],
        )
    if options.png is not None:
        draw(options.png, chats, options.turns)


def main() -> None:
    """Parses the command line and runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="models/demo")
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--n-system", type=int, default=900, help="tokens of the system prompt")
    parser.add_argument("--n-question", type=int, default=24, help="tokens of a question")
    parser.add_argument("--n-answer", type=int, default=32, help="tokens of an answer")
    parser.add_argument(
        "--think-s", type=float, default=0.0, help="seconds before each question, in the mean"
    )
    parser.add_argument(
        "--dtype", choices=sorted(OUR_DTYPES), default="bf16", help="of all engines"
    )
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs")
    parser.add_argument("--system", default="", help="more options of services.local")
    parser.add_argument(
        "--peers", type=lambda given: given.split(","), default=[], help="that cache: vllm"
    )
    parser.add_argument("--venvs", type=Path, default=DEFAULT_VENVS, help="where the peers are")
    parser.add_argument("--threads", type=int, default=2, help="of each peer")
    parser.add_argument("--max-model-len", type=int, default=2048, help="of each peer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--png", type=Path, default=None)
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
