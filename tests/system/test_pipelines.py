"""Two pipelines beside each other: their tokens are those of one pipeline. The loss of a rank stops
neither the other pipeline nor any stream, and a worker that is stopped for some seconds stops no
stream for as long. A worker that is told to stop loses nothing."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random

import pytest

from tests.faults.checker import Expected, StreamId, Tokens, check
from tests.faults.client import Clients, Log
from tests.faults.crowd import MAX_PAUSE_S, Crowd, answers_of
from tests.faults.tree import n_serving
from tests.faults.workload import draw_questions
from tests.system.conftest import write_model
from tests.system.stack import Stack, serving

pytestmark = [pytest.mark.system, pytest.mark.thorough]

QUESTIONS = draw_questions(Random(3), 8)
"""Greedy and seeded requests, with penalties, stop strings and several answers."""
N_CLIENTS = 6
LIMIT_S = 60.0
WORKER = ("services.worker", "services.worker.rank")
"""The modules of a worker's processes: its controller and its rank."""
STOP_S = 4.0
"""Seconds for which a worker is stopped: longer than a pipeline is waited for, and shorter than the
silence for which a stage or a rank counts as lost."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def answers_of_one(model: Path) -> dict[StreamId, Expected]:
    with serving(model) as stack:
        return asyncio.run(_answers(stack))


async def _answers(stack: Stack) -> dict[StreamId, Expected]:
    clients = Clients(stack.http, stack.grpc, Log())
    try:
        return await answers_of(clients, QUESTIONS)
    finally:
        await clients.close()


@pytest.mark.parametrize("n_stages", [1, 2])
async def test_two_pipelines_answer_as_one_and_one_serves_while_the_other_recovers(
    model: Path, answers_of_one: dict[StreamId, Expected], n_stages: int
) -> None:
    # A spare would take over before anyone sees that one pipeline serves.
    with serving(
        model, pipelines=2, stages=n_stages, spares=0, metrics=True, fail_fast=False
    ) as stack:
        await _until(stack, lambda n: n == 2)
        assert await _answers(stack) == answers_of_one
        log, crowd, n_meanwhile = await _without(stack, "services.worker.rank", signal.SIGKILL)
        assert check(log.events, crowd.expected(answers_of_one), max_pause_s=MAX_PAUSE_S) == []
        assert n_meanwhile > 0
        before = stack.metrics("scheduler")
        log, crowd, n_meanwhile = await _without(stack, "services.worker", signal.SIGTERM)
        after = stack.metrics("scheduler")
    assert check(log.events, crowd.expected(answers_of_one), max_pause_s=MAX_PAUSE_S) == []
    assert n_meanwhile > 0
    for name in ("orcinus_pipeline_losses_total", "orcinus_requests_suspended_total"):
        assert after.sum(name) == before.sum(name)
    assert any("exited with status 0; starting it again" in line for line in stack.output)


async def test_streams_of_a_stopped_worker_go_on_elsewhere_and_its_epoch_goes_on(
    model: Path, answers_of_one: dict[StreamId, Expected]
) -> None:
    with serving(model, pipelines=2, stages=2, metrics=True, fail_fast=False) as stack:
        await _until(stack, lambda n: n == 2)
        assert await _answers(stack) == answers_of_one  # so that usual times are known
        before = stack.metrics("scheduler")
        log, crowd = await _with_a_stop(stack)
        after = stack.metrics("scheduler")
    assert check(log.events, crowd.expected(answers_of_one), max_pause_s=MAX_PAUSE_S) == []
    assert after.sum("orcinus_pipelines_late_total") > before.sum("orcinus_pipelines_late_total")
    assert after.sum("orcinus_requests_moved_total") > before.sum("orcinus_requests_moved_total")
    assert after.sum("orcinus_pipeline_losses_total") == 0
    assert after.sum("orcinus_epochs_formed_total") == 2
    assert after.sum("orcinus_requests_suspected_total") == 0


async def _with_a_stop(stack: Stack) -> tuple[Log, Crowd]:
    """Stops a worker, its rank included, until all streams of that time have gone on or ended, and
    at least for `STOP_S`. Returns what the clients have written down and asked."""
    async with _crowded(stack) as (log, crowd):
        stack.look_at_tree()
        stopped = [stack.pids(module)[0] for module in WORKER]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        stopping = asyncio.create_task(asyncio.sleep(STOP_S))
        try:
            begun = dict(log.decoding)
            async with asyncio.timeout(LIMIT_S):
                while any(log.decoding.get(one) == last_s for one, last_s in begun.items()):
                    await asyncio.sleep(0.01)
            await stopping
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(1.0)  # the worker's batch returns, and it takes requests again
    return log, crowd


async def _without(stack: Stack, module: str, number: signal.Signals) -> tuple[Log, Crowd, int]:
    """Signals a process while clients get tokens. Returns what the clients have written down and
    asked, and the number of tokens they got while only one pipeline served."""
    async with _crowded(stack) as (log, crowd):
        stack.look_at_tree()
        stack.kill(module, number=number)
        await _until(stack, lambda n: n == 1)
        n_before = _n_tokens(log)
        await _until(stack, lambda n: n == 2)
        n_meanwhile = _n_tokens(log) - n_before
    return log, crowd, n_meanwhile


@contextlib.asynccontextmanager
async def _crowded(stack: Stack) -> AsyncIterator[tuple[Log, Crowd]]:
    """Runs the block while clients get tokens, and then lets all requests end."""
    log = Log()
    clients = Clients(stack.http, stack.grpc, log)
    crowd = Crowd(clients, QUESTIONS)
    asking = [asyncio.create_task(crowd.ask_all_the_time()) for _ in range(N_CLIENTS)]
    try:
        async with asyncio.timeout(LIMIT_S):
            while len(log.decoding) < N_CLIENTS // 2:
                await asyncio.sleep(0.01)
        yield log, crowd
        crowd.is_over = True
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*asking)
    finally:
        for task in asking:
            task.cancel()
        await clients.close()


async def _until(stack: Stack, is_reached: Callable[[int], bool]) -> None:
    """Waits until the number of pipelines that serve satisfies a condition."""
    async with asyncio.timeout(LIMIT_S):
        while not is_reached(n_serving(await asyncio.to_thread(stack.metrics, "scheduler"))):
            await asyncio.sleep(0.05)


def _n_tokens(log: Log) -> int:
    return sum(len(event.token_ids) for event in log.events if isinstance(event, Tokens))
