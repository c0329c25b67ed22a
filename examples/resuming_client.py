"""Streams a completion that outlives the frontends it comes through.

python examples/resuming_client.py [--chat] [--prompt=TEXT] [--max-tokens=N] [base URL]...

A stream that shows tokens can go on at any frontend. The client keeps the seed, which is in the
first chunk, the tokens of the answers, and the id of the last event. After a break it posts the
same request with these, and gets what it lacks, as if nothing had happened.
"""

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

TIMEOUT = httpx.Timeout(60, connect=5)
"""Seconds without a byte after which a stream counts as broken."""

MAX_FAILURES = 12
"""Attempts in a row that bring nothing, after which the client gives up."""

MAX_PAUSE_S = 5.0

MAY_BE_TRIED_AGAIN = {429, 502, 503, 504}
CODES_OF_THESE = {"unavailable", "rate_limit_exceeded"}


class Broken(Exception):
    """The stream ended before its end; any frontend may have the rest."""


class Refused(Exception):
    """The server does not want the request, here or elsewhere."""


@dataclass
class Progress:
    """Everything that it takes to go on."""

    event_id: str = ""
    seed: int = 0
    token_ids: list[list[int]] = field(default_factory=list)

    def headers(self) -> dict[str, str]:
        return {"Last-Event-ID": self.event_id} if self.event_id else {}

    def body(self) -> dict[str, Any]:
        if not self.event_id:
            return {}
        return {"resumption": {"seed": self.seed, "token_ids": self.token_ids}}

    def note(self, event_id: str, chunk: dict[str, Any]) -> None:
        """Takes an event that is there as a whole."""
        self.event_id = event_id
        self.seed = chunk.get("seed", self.seed)
        for choice in chunk["choices"]:
            while len(self.token_ids) <= choice["index"]:
                self.token_ids.append([])
            self.token_ids[choice["index"]] += choice["token_ids"]


def stream(
    base_urls: Sequence[str],
    path: str,
    body: dict[str, Any],
    *,
    max_failures: int = MAX_FAILURES,
) -> Iterator[dict[str, Any]]:
    """Yields the chunks of a completion or chat, from one frontend or several in turn.

    Raises:
        Refused: it must not be tried again.
        Broken: nobody has answered for too long.
    """
    progress = Progress()
    n_failures = 0
    for base_url in itertools.cycle(base_urls):
        try:
            for event_id, chunk in _events(base_url + path, body, progress):
                n_failures = 0
                progress.note(event_id, chunk)
                yield chunk
            return
        except (httpx.TransportError, Broken) as error:
            n_failures += 1
            print(f"\n[{base_url}: {error or type(error).__name__}]", file=sys.stderr)
            if n_failures == max_failures:
                raise Broken(f"gave up after {n_failures} attempts") from error
        if n_failures > 1:  # the first other frontend is asked at once
            time.sleep(random.uniform(0.5, 1) * min(MAX_PAUSE_S, 0.1 * 2**n_failures))


def _events(
    url: str, body: dict[str, Any], progress: Progress
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields id and chunk of the events that one frontend sends, until the stream is complete."""
    body = {**body, "stream": True, "return_token_ids": True, **progress.body()}
    with httpx.stream(
        "POST", url, json=body, headers=progress.headers(), timeout=TIMEOUT
    ) as response:
        if response.status_code != 200:
            kind = Broken if response.status_code in MAY_BE_TRIED_AGAIN else Refused
            raise kind(f"{response.status_code} {response.read().decode()}")
        for event_id, data in _parse(response.iter_lines()):
            if data == "[DONE]":
                return
            chunk = json.loads(data)
            if "error" in chunk:
                kind = Broken if chunk["error"]["code"] in CODES_OF_THESE else Refused
                raise kind(chunk["error"]["message"])
            yield event_id, chunk
    raise Broken("it hung up")


def _parse(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields id and data of each server-sent event; one without its empty line is not complete."""
    event_id = data = ""
    for line in lines:
        name, _, value = line.partition(": ")
        if name == "id":
            event_id = value
        elif name == "data":
            data = value
        elif not line:
            yield event_id, data


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("base_urls", nargs="*", default=["http://127.0.0.1:8000/v1"])
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int)
    arguments = parser.parse_args()
    body: dict[str, Any] = {"max_tokens": arguments.max_tokens, "seed": arguments.seed}
    if arguments.chat:
        path = "/chat/completions"
        body["messages"] = [{"role": "user", "content": arguments.prompt}]
    else:
        path = "/completions"
        body["prompt"] = arguments.prompt
    for chunk in stream(arguments.base_urls, path, body):
        for choice in chunk["choices"]:
            print(choice.get("text") or choice.get("delta", {}).get("content") or "", end="")
        sys.stdout.flush()
    print()


if __name__ == "__main__":
    main()
