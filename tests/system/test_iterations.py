"""The paper's behaviour, read off the records of real iterations (Orca, sections 3 and 4)."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from orcinus.v1 import watch_pb2

from tests.limits import HANG_S
from tests.system.stack import IterationRecords, Stack, serving

Record = watch_pb2.IterationEvent

N_LONG = 500
"""Tokens of a request that still runs when others have come and gone, also on a busy machine."""


def ask(stack: Stack, n_prompt: int, max_tokens: int) -> dict[str, Any]:
    """An answer that takes an iteration for each token: with log-probabilities there are no
    drafts."""
    return stack.complete(
        list(range(3, 3 + n_prompt)),
        max_tokens=max_tokens,
        temperature=0,
        ignore_eos=True,
        logprobs=0,
    )


def rides(records: list[Record]) -> dict[int, list[Record]]:
    """Records by request, in the order in which requests were first run."""
    result: dict[int, list[Record]] = {}
    for record in records:
        for number in record.numbers:
            result.setdefault(number, []).append(record)
    return result


def n_ended(records: list[Record]) -> int:
    return sum(len(record.ended) for record in records)


def test_late_ones_join_short_ones_leave_and_prefill_shares_iterations_with_decode(
    one_stage: Stack,
) -> None:
    with one_stage.iterations() as watch, ThreadPoolExecutor(2) as threads:
        long: Future[Any] = threads.submit(ask, one_stage, 6, N_LONG)
        watch.wait_for(lambda records: len(records) >= 5)
        short = threads.submit(ask, one_stage, 9, 4)
        assert len(short.result()["token_ids"]) == 4
        assert len(long.result()["token_ids"]) == N_LONG
        watch.wait_for(lambda records: n_ended(records) == 2)
    by_request = rides(watch.records)
    (_, long_rides), (_, short_rides) = by_request.items()
    assert len(long_rides) == N_LONG
    assert len(short_rides) == 4
    first = short_rides[0]
    assert list(first.kinds) == [watch_pb2.SPAN_KIND_DECODE, watch_pb2.SPAN_KIND_PREFILL], (
        "its prefill shares the iteration with the other's decode"
    )
    assert list(first.n_tokens) == [1, 9]
    assert list(first.n_new_tokens) == [1, 1]
    assert [record.iteration for record in short_rides] == list(
        range(first.iteration, first.iteration + 4)
    )
    assert short_rides[-1].iteration < long_rides[-1].iteration, "it did not wait for the other"
    [place] = short_rides[-1].ended
    assert short_rides[-1].start_positions[place] == 9 + 3 - 1


def test_two_stages_have_two_batches_in_flight_and_first_come_is_first_served(
    two_stages: Stack,
) -> None:
    body = {
        "prompt": [list(range(3, 8))] * 6,  # in one call, so that they come together
        "max_tokens": 40,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,  # there are no drafts
        "return_token_ids": True,
    }
    with two_stages.iterations() as watch:
        choices = two_stages.post("/v1/completions", body).json()["choices"]
        assert [len(choice["token_ids"]) for choice in choices] == [40] * 6
        watch.wait_for(lambda records: n_ended(records) == 6)
    assert max(record.n_in_flight for record in watch.records) == 2
    busy = [record for record in watch.records if record.n_running >= 4]
    assert sum(record.n_in_flight == 2 for record in busy) >= 0.8 * len(busy)
    assert all(1 <= len(record.numbers) <= 2 for record in watch.records)
    assert all(len(record.stages) == 2 for record in watch.records)
    order = list(rides(watch.records))
    ends = [record.numbers[place] for record in watch.records for place in record.ended]
    assert set(ends[:4]) == set(order[:4]), "equal requests end in the order they came"
    for record in watch.records:
        assert record.n_reserved_slots <= watch.n_slots
        assert record.n_allocated_slots <= record.n_reserved_slots


def test_a_client_that_leaves_frees_its_memory_within_an_iteration(one_stage: Stack) -> None:
    with one_stage.iterations() as watch, ThreadPoolExecutor(1) as threads:
        other = threads.submit(ask, one_stage, 4, N_LONG)
        watch.wait_for(lambda records: len(records) >= 3)
        alone = watch.records[-1].n_reserved_slots
        _stream_and_hang_up(one_stage, watch, alone)
        watch.wait_for(lambda records: records[-1].n_reserved_slots == alone)
        other.result()
        watch.wait_for(lambda records: n_ended(records) >= 2)
    _, gone = rides(watch.records).values()
    assert len(gone) < 1000, "it was stopped long before its 3000 tokens"
    after = [r for r in watch.records if r.iteration > gone[-1].iteration]
    # The next selection sees the memory free, unless it was made before the cancellation came.
    assert all(record.n_reserved_slots == alone for record in after[1:-1])


def _stream_and_hang_up(stack: Stack, watch: IterationRecords, alone: int) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with httpx.stream(
        "POST", f"{stack.http}/v1/completions", json=body, timeout=HANG_S
    ) as response:
        lines = response.iter_lines()
        while not next(lines).startswith("data:"):
            pass
        watch.wait_for(lambda records: any(r.n_reserved_slots > alone for r in records))


@pytest.mark.thorough
@pytest.mark.parametrize("temperature", [0, 0.3], ids=["greedy", "sampled"])
def test_drafts_bring_several_tokens_at_once_and_no_others(
    model: Path, one_stage: Stack, temperature: float
) -> None:
    prompt = [5, 6, 7, 8, 9, 10] * 8
    asked: dict[str, Any] = {
        "max_tokens": 300,
        "temperature": temperature,
        "seed": 3,
        "ignore_eos": True,
    }
    # A bias towards few tokens: a model of random weights then repeats itself.
    asked["logit_bias"] = {str(token_id): 40 for token_id in (5, 6, 7)}
    expected = one_stage.complete(prompt, **asked)
    with serving(model, stages=2) as drafting, drafting.iterations() as watch:
        assert drafting.complete(prompt, **asked)["token_ids"] == expected["token_ids"]
        watch.wait_for(lambda records: n_ended(records) == 1)
    decodes = [n for record in watch.records[1:] for n in record.n_tokens]
    assert any(n_tokens > 1 for n_tokens in decodes)
    assert len(decodes) < 290
