"""Stages of several ranks: the same tokens however wide they are, and a clean end whoever dies."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.system.stack import Stack, serving
from tests.system.test_life import MAX_S, call_until_it_breaks, stream_until_it_breaks
from tests.system.test_oracle import check_mixed_requests

# What ranks of a stage compute is held by `tests/worker/models/test_tensor_parallel.py`.
pytestmark = pytest.mark.thorough


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((1, 2), id="1 stage of 2"),
        pytest.param((2, 2), id="2 stages of 2"),
    ],
)
def wide(model: Path, request: pytest.FixtureRequest) -> Iterator[Stack]:
    n_stages, tp_size = request.param
    with serving(model, stages=n_stages, tp=tp_size, dtype="float32", max_batch_size=8) as stack:
        yield stack


def test_greedy_tokens_equal_transformers(model: Path, wide: Stack) -> None:
    check_mixed_requests(wide, model, Random(3))


def test_a_seed_gives_the_tokens_it_gives_on_one_rank(
    wide: Stack, sampled: list[dict[str, Any]]
) -> None:
    for item in sampled:
        options = {key: value for key, value in item.items() if key != "expected"}
        assert wide.complete(**options)["token_ids"] == item["expected"]


@pytest.mark.parametrize("index", range(4))
def test_whichever_rank_is_killed_the_requests_end_and_nothing_stays(
    model: Path, index: int
) -> None:
    with (
        serving(model, stages=2, tp=2) as stack,
        ThreadPoolExecutor(2) as threads,
        stack.iterations() as watch,
    ):
        streamed = threads.submit(stream_until_it_breaks, stack)
        called = threads.submit(call_until_it_breaks, stack)
        watch.wait_for(lambda records: records and records[-1].n_running == 2)
        killed = time.monotonic()
        stack.kill("services.worker.rank", index)
        assert called.result().name == "UNAVAILABLE"
        assert streamed.result()["code"] == "unavailable"
        assert time.monotonic() - killed < MAX_S
        assert stack.wait() != 0
        assert stack.survivors() == []
