"""Real scheduler processes, a Kubernetes API and a stage: who leads when processes are killed and
when the API server is away."""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from orcinus.v1 import sampling_pb2, scheduler_pb2, scheduler_pb2_grpc, worker_pb2

from services.common import rpc
from services.common.epochs import EPOCHS_PER_TERM
from tests.fake_kubernetes import (
    NAMESPACE,
    RUNNING,
    FakeKubernetes,
    fake_kubernetes,
    write_kubeconfig,
)
from tests.fakes import FakeStage, fake_stage

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0
NEVER_S = 600.0
"""A time that does not pass while a test runs."""


@dataclass
class Site:
    """An API, a stage, and the processes that compete for them."""

    api: FakeKubernetes
    stage: FakeStage
    kubeconfig: Path
    processes: contextlib.AsyncExitStack

    @property
    def holder(self) -> str:
        holder: str = (self.api.lease or {"spec": {}})["spec"].get("holderIdentity") or ""
        return holder

    @property
    def term(self) -> int:
        """The term of the epoch that the stage is in."""
        return self.stage.controller.epoch.number // EPOCHS_PER_TERM

    @contextlib.asynccontextmanager
    async def request(self) -> AsyncIterator[Any]:
        """Has the leader run a request that does not end; yields the stream of its frontend."""
        assert self.api.lease is not None
        address = self.api.lease["metadata"]["annotations"]["orcinus/leader-address"]
        async with rpc.connect(address) as channel:
            stream = scheduler_pb2_grpc.SchedulerServiceStub(channel).Connect()
            while not (await stream.read()).HasField("pipeline"):
                pass
            submission = scheduler_pb2.Submission(
                request_id="a",
                prompt_token_ids=[1, 2, 3],
                max_new_tokens=5,
                sampling=sampling_pb2.SamplingParams(temperature=0),
            )
            await stream.write(scheduler_pb2.ConnectRequest(submission=submission))
            await asyncio.wait_for(self.stage.rank.has_plan.wait(), LIMIT_S)
            yield stream

    def say_alive(self) -> None:
        """Sends the report of a stage that is there, however little it has to do."""
        epoch = self.stage.controller.epoch
        report = worker_pb2.WatchStageResponse(pipeline_id=epoch.pipeline_id, epoch=epoch.number)
        report.heartbeat.SetInParent()
        self.stage.controller.reports.publish(report.SerializeToString())

    async def start(self, pod: str, *, lease_s: float = NEVER_S, retry_s: float = 1.0) -> Process:
        """Starts a scheduler in a pod."""
        self.api.set_pod(pod, labels={"app": "scheduler"}, states=[RUNNING])
        settings = {
            "address": "127.0.0.1:0",
            "n_stages": 1,
            "namespace": NAMESPACE,
            "worker_selector": "app=worker",
            "worker_port": self.stage.address.rpartition(":")[2],
            "lease_name": "orcinus-scheduler",
            "pod_name": pod,
            "pod_uid": f"{pod}-uid",
            "pod_ip": "127.0.0.1",
            "lease_duration_s": lease_s,
            "retry_period_s": retry_s,
            "silence_limit_s": NEVER_S,
            "drain_s": NEVER_S,
        }
        path = os.pathsep.join((str(ROOT), str(ROOT / "protos/gen")))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "services.scheduler"),
            env={**os.environ, "PYTHONPATH": path, "KUBECONFIG": str(self.kubeconfig)}
            | {f"ORCINUS_{name.upper()}": str(value) for name, value in settings.items()},
        )
        self.processes.push_async_callback(_end, process)
        return process

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                await asyncio.sleep(0.02)


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with (
        fake_kubernetes() as api,
        fake_stage() as stage,
        contextlib.AsyncExitStack() as processes,
    ):
        api.set_pod("worker-0", ip="127.0.0.1")
        yield Site(api, stage, write_kubeconfig(api, tmp_path), processes)


@pytest.mark.thorough
async def test_a_standby_takes_over_from_a_leader_that_was_killed_before_its_lease_expires(
    site: Site,
) -> None:
    leader = await site.start("scheduler-0")
    await site.until(lambda: site.term == 1)
    await site.start("scheduler-1")
    # It has read the lease, and had time to reach the leader.
    await site.until(lambda: site.api.requests.count("get") >= 4)
    leader.send_signal(signal.SIGKILL)
    await site.until(lambda: site.term == 2)
    assert site.holder.startswith("scheduler-1_scheduler-1-uid_")


@pytest.mark.thorough
async def test_a_leader_keeps_a_lease_that_was_deleted_and_hands_over_when_it_is_told_to_stop(
    site: Site,
) -> None:
    site.api.lease = None  # the first leader makes it
    leader = await site.start("scheduler-0", retry_s=0.5)
    await site.until(lambda: site.term == 1)
    await site.start("scheduler-1", retry_s=0.5)
    await site.until(lambda: site.api.requests.count("get") >= 6)
    holder, site.api.lease = site.holder, None
    await site.until(lambda: site.api.lease is not None)
    n_reads = site.api.requests.count("get")
    await site.until(lambda: site.api.requests.count("get") >= n_reads + 4)
    assert (site.holder, site.term) == (holder, 1)
    async with site.request() as stream:
        leader.send_signal(signal.SIGTERM)
        await site.until(lambda: site.term == 2)
        messages = []
        while (message := await asyncio.wait_for(stream.read(), LIMIT_S)) is not grpc.aio.EOF:
            messages.append(message)
        assert [item.reason for message in messages for item in message.completed] == [
            scheduler_pb2.COMPLETION_REASON_UNAVAILABLE
        ]
        assert not any(message.suspended for message in messages)
    assert await asyncio.wait_for(leader.wait(), LIMIT_S) == 0


@pytest.mark.thorough  # in one process, `cluster/test_leader_watch.py` has it by default
async def test_a_new_scheduler_does_not_wait_for_a_leader_whose_pod_is_gone(site: Site) -> None:
    leader = await site.start("scheduler-0")
    await site.until(lambda: site.term == 1)
    leader.send_signal(signal.SIGKILL)
    await leader.wait()
    site.api.delete_pod("scheduler-0")
    await site.start("scheduler-1")
    await site.until(lambda: site.term == 2)


@pytest.mark.thorough
async def test_a_container_that_starts_again_leads_again_before_its_lease_expires(
    site: Site,
) -> None:
    leader = await site.start("scheduler-0")
    await site.until(lambda: site.term == 1)
    leader.send_signal(signal.SIGKILL)
    await leader.wait()
    await site.start("scheduler-0")
    await site.until(lambda: site.term == 2)


@pytest.mark.thorough
async def test_a_leader_forms_epochs_while_the_api_server_is_away_and_keeps_its_lease(
    site: Site,
) -> None:
    leader = await site.start("scheduler-0", lease_s=2, retry_s=0.2)
    await site.until(lambda: site.term == 1)
    standby = await site.start("scheduler-1", lease_s=2, retry_s=0.2)
    await site.until(lambda: site.api.requests.count("get") >= 4)
    holder, epoch = site.holder, site.stage.controller.epoch.number
    site.api.errors = dict.fromkeys(("get", "update", "list", "watch"), 503)
    site.api.drop_connections()
    for _ in range(6):  # three leases
        await asyncio.sleep(1)
        site.say_alive()
    assert site.stage.controller.epoch.number == epoch
    site.stage.controller.reports.end()  # the epoch is lost
    await site.until(lambda: site.stage.controller.epoch.number == epoch + 1)
    site.api.errors.clear()
    version = site.api.version
    await site.until(lambda: site.api.version >= version + 10)
    assert site.holder == holder
    assert site.term == 1
    assert leader.returncode is None
    assert standby.returncode is None


@pytest.mark.thorough
async def test_a_leader_without_the_api_server_ends_when_another_has_the_stage(site: Site) -> None:
    leader = await site.start("scheduler-0", lease_s=1, retry_s=0.2)
    await site.until(lambda: site.term == 1)
    site.api.errors = dict.fromkeys(("get", "update", "list", "watch"), 503)
    await site.until(lambda: site.api.requests[-2:] == ["update", "update"])
    another_leaders = 2 * EPOCHS_PER_TERM + 1
    await site.stage.join(another_leaders)
    async with asyncio.timeout(LIMIT_S):
        assert await leader.wait() == 1
    assert site.stage.controller.epoch.number == another_leaders
