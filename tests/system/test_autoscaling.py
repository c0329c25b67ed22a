"""A model that sleeps: real workers that the scheduler has started and stopped by the API."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fake_kubernetes import DEPLOYMENT, LEASE
from tests.limits import HANG_S
from tests.system.pods import Pods, WorkerDeployment, end, pods

pytestmark = [pytest.mark.system, pytest.mark.thorough]

SETTINGS = {
    "n_stages": 2,
    "worker_deployment": DEPLOYMENT,
    "min_pipelines": 0,
    "max_pipelines": 2,
    "lease_name": LEASE,
    "pod_name": "scheduler-0",
    "sleep_after_s": 5,
}


@contextlib.asynccontextmanager
async def deployed(directory: Path) -> AsyncIterator[tuple[Pods, WorkerDeployment]]:
    async with pods(directory) as made:
        made.api.n_replicas = 0
        deployment = WorkerDeployment(made)
        following = asyncio.create_task(deployment.run())
        try:
            yield made, deployment
        finally:
            following.cancel()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():
            await asyncio.sleep(0.05)


async def state(cluster: Pods) -> str:
    answer = await cluster.get("/v1/models")
    if answer is None or answer.status_code != 200:
        return ""
    return str(answer.json()["data"][0]["state"])


async def until_state(cluster: Pods, name: str) -> None:
    async with asyncio.timeout(HANG_S):
        while await state(cluster) != name:
            await asyncio.sleep(0.05)


async def complete(cluster: Pods) -> dict[str, Any]:
    async with cluster.client() as client:
        body = {"model": "demo", "prompt": "hello", "max_tokens": 4, "temperature": 0}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice


async def test_a_model_sleeps_and_a_request_wakes_it_also_after_all_else_has_restarted(
    tmp_path: Path,
) -> None:
    async with deployed(tmp_path) as (cluster, deployment):
        scheduler = await cluster.start_scheduler(**SETTINGS)
        frontend = await cluster.start_frontend()
        # Nobody knows the model yet: a pipeline starts once, and goes when there are no requests.
        await cluster.until_serving()
        assert deployment.n_workers == 2
        first = await complete(cluster)
        await until(lambda: deployment.n_workers == 0)
        await until_state(cluster, "asleep")
        assert (await cluster.metrics()).sum("orcinus_pipelines_wanted") == 0
        for process in (scheduler, frontend):
            await end(process)
        await cluster.start_scheduler(**SETTINGS)
        await cluster.start_frontend()
        await until_state(cluster, "asleep")
        ready = await cluster.get("/ready")
        assert ready is not None
        assert ready.status_code == 200
        assert deployment.n_workers == 0
        assert (await complete(cluster))["text"] == first["text"]
        await until(lambda: deployment.n_workers == 0)
