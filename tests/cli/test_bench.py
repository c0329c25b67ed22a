"""Figures of a load are those of its requests, and failed ones count as that alone."""

import pytest

from services.cli.bench import figures, parser, percentiles, report
from services.cli.load import Answered, Load
from tests.cli.fake_api import FakeApi

GOOD = [Answered(0.0, 0.5, 1.5, 11), Answered(1.0, 1.25, 2.0, 1), Answered(0.0, 1.0, 2.0, 5)]


def test_figures_are_those_of_requests_that_did_not_fail() -> None:
    found = figures([*GOOD, Answered(0.0, None, 9.0, 0, "HTTP 429: full")])
    assert (found["n_requests"], found["n_failed"]) == (4, 1)
    assert (found["seconds"], found["output_tokens"]) == (2.0, 17)
    assert (found["tokens_per_s"], found["requests_per_s"]) == (8.5, 1.5)
    assert found["ttft_s"] == {"p50": 0.5, "p90": 1.0, "p99": 1.0}
    assert found["tpot_s"] == {"p50": 0.1, "p90": 0.25, "p99": 0.25}


def test_without_answers_there_are_no_percentiles() -> None:
    found = figures([Answered(0.0, None, 0.0, 0, "no")])
    assert (found["tokens_per_s"], found["ttft_s"]) == (0.0, {})
    options = parser().parse_args([])
    assert len(report(found, options)) == 2


@pytest.mark.parametrize(
    ("n", "expected"), [(1, [0, 0, 0]), (10, [4, 8, 9]), (100, [49, 89, 98]), (200, [99, 179, 197])]
)
def test_percentiles_are_by_nearest_rank(n: int, expected: list[int]) -> None:
    assert [*percentiles(list(range(n))).values()] == expected


def event(n: int) -> dict[str, object]:
    return {"choices": [{"text": "x" * n}], "usage": None}


async def test_a_load_sends_what_it_says() -> None:
    usage = {"choices": [], "usage": {"completion_tokens": 3}}
    with FakeApi(lambda body: [event(1), event(2), usage]).serving() as api:
        load = Load(
            url=api.url,
            model="fake",
            api_key="secret",
            vocabulary=[5, 6, 7],
            n_users=3,
            n_requests=7,
            n_prompt_tokens=4,
            n_output_tokens=3,
        )
        answered = await load.run()
    assert len(answered) == len(api.bodies) == 7
    assert all(len(body["prompt"]) == 4 for body in api.bodies)
    assert {token for body in api.bodies for token in body["prompt"]} <= {5, 6, 7}
    assert all((it.n_tokens, it.error) == (3, "") for it in answered)
    assert all(it.sent <= (it.first or 0) <= it.last for it in answered)


async def test_what_fails_is_told() -> None:
    with FakeApi(lambda body: (429, "full")).serving() as api:
        (refused,) = await at(api.url).run()
    (lost,) = await at("http://127.0.0.1:1").run()
    with FakeApi(lambda body: [{"error": {"message": "lost"}}]).serving() as api:
        (broken,) = await at(api.url).run()
    assert refused.error.startswith("HTTP 429: ")
    assert "full" in refused.error
    assert lost.error
    assert "lost" in broken.error


def at(url: str) -> Load:
    """A single request to a server."""
    return Load(url, "fake", None, [1], 1, 1, 1, 1)
