"""Each stage that loses a rank is taken over by the spare that was there, one loss after the
other."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import grpc
import httpx
import psutil
import pytest
from orcinus.v1 import worker_pb2, worker_pb2_grpc

from tests.system.stack import Stack, serving

pytestmark = pytest.mark.thorough

N_STAGES = 2
LIMIT_S = 120.0
CALL = {
    "prompt": [5, 6, 7] * 20,
    "max_tokens": 300,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}
FREE = worker_pb2.WORKER_STATE_FREE
READY = worker_pb2.WORKER_STATE_READY

Found = TypeVar("Found")


def describe(address: str) -> worker_pb2.DescribeResponse:
    """Returns a worker's description of itself, or an empty one while the worker does not
    answer."""
    with grpc.insecure_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            found: worker_pb2.DescribeResponse = stub.Describe(
                worker_pb2.DescribeRequest(), timeout=1
            )
        except grpc.RpcError:
            return worker_pb2.DescribeResponse()
    return found


async def until(find: Callable[[], Found | None]) -> Found:
    """Waits until `find` returns a value, and returns it."""
    async with asyncio.timeout(LIMIT_S):
        while (found := await asyncio.to_thread(find)) is None:
            await asyncio.sleep(0.05)
    return found


class Workers:
    """The workers of a stack."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._addresses = stack.stage_addresses()

    def spare(self) -> str | None:
        """Returns the address of the worker without a stage, if all others hold different
        stages."""
        answers = {address: describe(address) for address in self._addresses}
        held = {it.stage_index for it in answers.values() if it.state == READY}
        free = [it for it, answer in answers.items() if answer.state == FREE and answer.traits]
        return free[0] if len(held) == N_STAGES and len(free) == 1 else None

    def has_taken(self, address: str, stage: int) -> bool | None:
        """Returns True if a worker serves a stage."""
        found = describe(address)
        return (found.state == READY and found.stage_index == stage) or None

    def processes_of(self, stage: int) -> list[psutil.Process]:
        """Returns the controller of a stage, and its ranks."""
        self._stack.look_at_tree()
        for pid in self._stack.pids("services.worker"):
            controller = psutil.Process(pid)
            ports = {it.laddr.port for it in controller.net_connections("tcp")}
            for address in self._addresses:
                found = describe(address)
                is_it = found.state == READY and found.stage_index == stage
                if is_it and int(address.rpartition(":")[2]) in ports:
                    return [controller, *controller.children()]
        raise AssertionError(f"no worker serves stage {stage}")


async def answers(stack: Stack) -> AsyncIterator[list[int]]:
    """Yields the tokens of one answer after the other."""
    async with httpx.AsyncClient(base_url=stack.http, timeout=LIMIT_S) as client:
        while True:
            response = await client.post("/v1/completions", json=CALL)
            yield response.json()["choices"][0]["token_ids"]


async def test_a_spare_takes_over_each_stage(model: Path) -> None:
    with serving(model, stages=N_STAGES, spares=1, fail_fast=False) as stack:
        workers, told = Workers(stack), answers(stack)
        expected = await anext(told)
        for stage in (1, 0):
            spare = await until(workers.spare)
            answering = asyncio.ensure_future(anext(told))
            *_, rank = workers.processes_of(stage)
            rank.kill()
            await until(lambda: workers.has_taken(spare, stage))  # noqa: B023 - at once
            assert await answering == expected
