"""A rank, a worker or the leading scheduler is killed under streams: nothing that was computed is
computed again, and all tokens are those of an undisturbed system."""

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from services.local.memory_directory import MEMORY, MemoryDirectory
from tests.system.conftest import VOCAB_SIZE
from tests.system.stack import Stack, serving

pytestmark = pytest.mark.thorough

N_STREAMS = 8
LIMIT_S = 60.0
BLOCK_SIZE = 16
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.5},
    {"temperature": 0, "repetition_penalty": 1.3},
]


def calls() -> list[dict[str, Any]]:
    """Requests whose prompts take several blocks."""
    source = Random(11)
    return [
        {
            "prompt": [source.randrange(3, VOCAB_SIZE) for _ in range(40 + 25 * index)],
            "max_tokens": 300,
            "seed": index,
            "ignore_eos": True,
            "return_token_ids": True,
            **SAMPLINGS[index % len(SAMPLINGS)],
        }
        for index in range(N_STREAMS)
    ]


async def answers_of(stack: Stack) -> list[list[int]]:
    async with httpx.AsyncClient(timeout=LIMIT_S) as client:
        responses = await asyncio.gather(
            *(client.post(f"{stack.http}/v1/completions", json=call) for call in calls())
        )
    return [response.json()["choices"][0]["token_ids"] for response in responses]


async def until(holds: Any) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not holds():
            await asyncio.sleep(0.05)


def directories() -> set[str]:
    """Names of the directories of local systems in memory."""
    return {path.name for path in MEMORY.iterdir() if path.name.startswith("orcinus-local-")}


@pytest.fixture(params=[1, 2], ids=["1 rank", "2 ranks"])
def stack(model: Path, request: pytest.FixtureRequest) -> Iterator[Stack]:
    with serving(
        model, stages=2, tp=request.param, spares=1, fail_fast=False, metrics=True
    ) as stack:
        yield stack


@pytest.mark.parametrize("module", ["services.worker.rank", "services.worker"])
async def test_nothing_is_computed_again_after_a_process_was_killed(
    stack: Stack, module: str
) -> None:
    expected = await answers_of(stack)
    await until(lambda: any("waits_for_stage" in line for line in stack.output) or is_whole(stack))
    before = stack.metrics("scheduler").sum("orcinus_generation_tokens_total")
    answering = asyncio.create_task(answers_of(stack))

    def n_generated() -> float:
        return stack.metrics("scheduler").sum("orcinus_generation_tokens_total") - before

    await until(lambda: n_generated() > 40 * N_STREAMS)
    n_recomputed = stack.metrics("scheduler").sum("orcinus_recomputed_tokens_total")
    stack.look_at_tree()
    stack.kill(module, 1)
    assert await answering == expected
    after = stack.metrics("scheduler")
    assert after.sum("orcinus_pipeline_losses_total") == 1
    # Of each request, the token in flight, or a block that the token was to fill.
    n_again = after.sum("orcinus_recomputed_tokens_total") - n_recomputed
    assert N_STREAMS <= n_again <= N_STREAMS * BLOCK_SIZE


async def test_a_new_leader_goes_on_with_what_was_computed(stack: Stack) -> None:
    expected = await answers_of(stack)
    await until(lambda: is_whole(stack) and len(stack.pids("services.scheduler")) == 2)
    before = stack.metrics("scheduler").sum("orcinus_pipeline_epoch")
    n_before = stack.metrics("scheduler").sum("orcinus_generation_tokens_total")
    answering = asyncio.create_task(answers_of(stack))

    def n_generated() -> float:
        return stack.metrics("scheduler").sum("orcinus_generation_tokens_total") - n_before

    await until(lambda: n_generated() > 40 * N_STREAMS)
    leader, _ = sorted(stack.pids("services.scheduler"))
    os.kill(leader, 9)
    assert await answering == expected
    after = stack.metrics("scheduler")
    assert after.sum("orcinus_pipeline_epoch") > before
    assert after.sum("orcinus_pipeline_losses_total") == 0, "of the new leader"
    assert after.sum("orcinus_requests_resumed_total") == N_STREAMS
    # Of each request, what is not in a full block, and a block that was in flight.
    n_again = after.sum("orcinus_recomputed_tokens_total")
    assert N_STREAMS <= n_again <= 2 * N_STREAMS * BLOCK_SIZE


def is_whole(stack: Stack) -> bool:
    """Returns whether the spare worker runs."""
    stack.look_at_tree()
    return len(stack.pids("services.worker")) == 3


def test_the_memory_is_removed_at_the_end_and_after_a_kill_at_the_next_start(model: Path) -> None:
    before = directories()
    with serving(model, fail_fast=False) as stack:
        [name] = directories() - before
        [file] = (MEMORY / name).iterdir()
        assert file.stat().st_mode & 0o777 == 0o600
        assert (MEMORY / name).stat().st_mode & 0o777 == 0o700
    assert directories() == before
    with serving(model, fail_fast=False) as stack:
        [name] = directories() - before
        os.kill(stack._process.pid, 9)
        stack.wait()
        assert stack.survivors() == []
    assert directories() - before == {name}
    made = MemoryDirectory.make()
    assert made is not None
    assert name not in directories()
    made.remove()
    with contextlib.suppress(FileNotFoundError):
        assert not made.path.exists()
