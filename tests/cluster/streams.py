"""Streams that run while a deployment is changed, and checks of the tokens that they get."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.cluster.cluster import FRONTEND, Cluster, Pod
from tests.cluster.figures import Figures

PROMPT = "If the file does not exist,"
STREAM_BODIES: list[dict[str, Any]] = [
    {"prompt": PROMPT, "max_tokens": 150, **options}
    for options in (
        {"temperature": 0},
        {"seed": 5},
        {"seed": 6, "presence_penalty": 1.0, "repetition_penalty": 1.1},
        {"seed": 7, "n": 2, "stop": ["zebra"]},
    )
]
LOAD = {
    "host": FRONTEND,
    "port": 8000,
    "clients": 4,
    "body": {"prompt": PROMPT, "max_tokens": 24, "temperature": 0},
}
STREAMS: dict[str, Any] = {"host": FRONTEND, "port": 8000, "clients": 16, "streams": STREAM_BODIES}


def unchanged(before: list[Pod], after: list[Pod]) -> bool:
    """Whether the same containers run as before."""
    return [(pod.uid, pod.restarts) for pod in before] == [(pod.uid, pod.restarts) for pod in after]


def failures(outcomes: list[dict[str, Any]]) -> list[str]:
    """Returns the number, the status and the error of each request that was not answered."""
    return [
        f"{it['index']}: {it['status']}, {it['error']}" for it in outcomes if it["status"] != 200
    ]


class Streams:
    """Streams that run while something is done to the system."""

    def __init__(self, demo: Cluster, figures: Figures) -> None:
        self._demo = demo
        self._figures = figures
        with demo.load(**STREAMS) as load:
            self._undisturbed = {
                outcome["index"] % len(STREAM_BODIES): content(outcome) for outcome in load.finish()
            }

    @contextmanager
    def through(self, what: str, *, n_clients: int = STREAMS["clients"]) -> Iterator[None]:
        """Checks that the block neither loses nor changes a token of the streams."""
        with self._demo.load(**{**STREAMS, "clients": n_clients}) as load:
            yield
            outcomes = load.finish()
        longest_s = max(outcome["stream"]["longest_pause_s"] for outcome in outcomes)
        self._figures.add(f"{what}: longest pause of {len(outcomes)} streams", longest_s)
        assert failures(outcomes) == []
        for outcome in outcomes:
            expected = self._undisturbed[outcome["index"] % len(STREAM_BODIES)]
            assert content(outcome) == expected, outcome


def content(outcome: dict[str, Any]) -> tuple[list[list[int]], list[str]]:
    """The tokens of a stream's answers, and how they ended."""
    stream = outcome["stream"]
    return stream["token_ids"], sorted(stream["finish_reasons"])
