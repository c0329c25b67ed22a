"""`python -m benchmarks.serving.waking`: the time to the first token of a model that is asleep.

One scheduler, one frontend and a fake Kubernetes API run all the time. The benchmark plays the
Deployment: when the scheduler requests workers, the benchmark starts their processes. In each round
a streamed request wakes the model, and the model sleeps again. The results are medians over the
rounds, in seconds. A cluster needs more time: it also has to place the pods, and may fetch images
and weights.
"""

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc.aio
from orcinus.v1 import worker_pb2, worker_pb2_grpc

from services.common import rpc
from tests.fake_kubernetes import DEPLOYMENT
from tests.limits import HANG_S
from tests.system.pods import DEMO, Pods, WorkerDeployment, pods

LOOK_S = 0.01

PARTS = (
    "the scheduler asks for workers",
    "worker: its process starts and listens",
    "load: stages are assigned, and weights read",
    "join: the pipeline forms",
    "the request is sent, and its prompt computed",
)
"""The parts of the measured time, in order."""


async def _until(condition: Callable[[], Awaitable[bool]]) -> float:
    """Waits until a condition holds. Returns the time, in seconds of `perf_counter`, at which the
    condition first held."""
    async with asyncio.timeout(HANG_S):
        while True:
            if await condition():
                return time.perf_counter()
            await asyncio.sleep(LOOK_S)


async def _states(cluster: Pods, deployment: WorkerDeployment) -> list[int]:
    """Returns the state of each worker that answers."""
    states = []
    for host in deployment.hosts:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async with rpc.connect(f"{host}:{cluster.port}") as channel:
                stub = worker_pb2_grpc.WorkerServiceStub(channel)
                answer = await stub.Describe(worker_pb2.DescribeRequest(), timeout=1)
                states.append(answer.state)
    return states


async def _first_token(cluster: Pods) -> float:
    """Sends a request. Returns the time, in seconds of `perf_counter`, at which its first token
    arrives."""
    body = {"model": "demo", "prompt": "hello", "max_tokens": 1, "stream": True}
    async with (
        cluster.client() as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                return time.perf_counter()
    raise RuntimeError("the answer has no token")


async def _round(cluster: Pods, deployment: WorkerDeployment, n_stages: int) -> list[float]:
    """Wakes the model once. Returns the seconds of each of `PARTS`."""

    async def are_asked_for() -> bool:
        return bool(cluster.api.n_replicas)

    async def listen() -> bool:
        return len(await _states(cluster, deployment)) == n_stages

    async def are_ready() -> bool:
        ready = worker_pb2.WORKER_STATE_READY
        return await _states(cluster, deployment) == n_stages * [ready]

    async def serves() -> bool:
        answer = await cluster.get("/serving")
        return answer is not None and answer.status_code == 200

    begun_at = time.perf_counter()
    answering = asyncio.create_task(_first_token(cluster))
    times = [await _until(moment) for moment in (are_asked_for, listen, are_ready, serves)]
    times.append(await asyncio.wait_for(answering, HANG_S))
    return [end - start for start, end in zip([begun_at, *times], times, strict=False)]


async def _measure(model: Path, n_stages: int, n_rounds: int) -> list[list[float]]:
    """Returns the seconds of each of `PARTS`, for each round."""
    with tempfile.TemporaryDirectory() as directory:
        async with pods(Path(directory), model=model) as cluster:
            cluster.api.n_replicas = 0
            deployment = WorkerDeployment(cluster)
            following = asyncio.create_task(deployment.run())
            await cluster.start_scheduler(
                n_stages=n_stages,
                worker_deployment=DEPLOYMENT,
                min_pipelines=0,
                max_pipelines=1,
                sleep_after_s=1,
            )
            await cluster.start_frontend(served_model_name="demo")
            rounds = []
            for _ in range(n_rounds + 1):  # the model's first use is not counted
                await _asleep(cluster, deployment)
                rounds.append(await _round(cluster, deployment, n_stages))
            following.cancel()
    return rounds[1:]


async def _asleep(cluster: Pods, deployment: WorkerDeployment) -> None:
    async def is_asleep() -> bool:
        answer = await cluster.get("/serving")
        reason = "" if answer is None else answer.json().get("reason", "")
        return deployment.n_workers == 0 and "asleep" in reason

    await _until(is_asleep)


def main() -> None:
    """Runs the measurement, and prints the table for the docs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    rounds = asyncio.run(_measure(arguments.model, arguments.stages, arguments.rounds))
    print("| part | s |\n|---|---|")
    for part, seconds in zip(PARTS, zip(*rounds, strict=True), strict=True):
        print(f"| {part} | {statistics.median(seconds):.2f} |")
    whole = statistics.median([sum(seconds) for seconds in rounds])
    print(f"| **from the request to its first token** | **{whole:.2f}** |")


if __name__ == "__main__":
    main()
