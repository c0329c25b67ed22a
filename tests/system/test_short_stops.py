"""Processes that are stopped for a moment under load, and go on, are not taken for hung or lost."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.conftest import VOCAB_SIZE
from tests.system.stack import Stack, serving

pytestmark = pytest.mark.thorough

STOP_S = 0.7
MAX_STOP_S = 1.0
"""Longest stop that counts. The lowest limit is 1.5 s without a sign of life of a stage, which
gives one every 0.5 s."""
N_STREAMS = 8
LIMIT_S = 120.0
MODULES = ("services.worker.rank", "services.worker", "services.scheduler", "services.frontend")


def calls() -> list[dict[str, Any]]:
    return [
        {
            "prompt": [3 + (7 * index + at) % (VOCAB_SIZE - 3) for at in range(20)],
            "max_tokens": 300,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        for index in range(N_STREAMS)
    ]


async def answers_of(stack: Stack) -> list[list[int]]:
    async with httpx.AsyncClient(timeout=LIMIT_S) as client:
        responses = await asyncio.gather(
            *(client.post(f"{stack.http}/v1/completions", json=call) for call in calls())
        )
    return [response.json()["choices"][0]["token_ids"] for response in responses]


def stop_for_a_moment(pid: int) -> float:
    """Stops a process and lets it go on. Returns for how many seconds it was stopped."""
    began = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(STOP_S)
    finally:
        os.kill(pid, signal.SIGCONT)
    return time.monotonic() - began


async def test_no_process_is_given_up_that_was_stopped_for_a_moment(model: Path) -> None:
    with serving(model, stages=2, fail_fast=False, metrics=True) as stack:
        expected = await answers_of(stack)
        epoch = stack.metrics("scheduler").sum("orcinus_pipeline_epoch")
        tree = {process.pid for process in stack.tree}
        stops: dict[str, float] = {}
        for module in MODULES:
            for index, pid in enumerate(stack.pids(module)):
                answering = asyncio.create_task(answers_of(stack))
                await asyncio.sleep(0.2)
                stops[f"{module} {index}"] = await asyncio.to_thread(stop_for_a_moment, pid)
                assert await answering == expected
        if max(stops.values()) > MAX_STOP_S:
            pytest.skip(f"this machine is too busy to stop a process for {STOP_S} s: {stops}")
        stack.look_at_tree()
        assert {process.pid for process in stack.tree} == tree
        assert stack.metrics("scheduler").sum("orcinus_pipeline_epoch") == epoch
        assert stack.metrics("scheduler").sum("orcinus_pipeline_losses_total") == 0
