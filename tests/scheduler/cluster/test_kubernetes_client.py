"""The official client, the elector and the directory against an API on a real socket."""

import asyncio
import contextlib
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from kubernetes.aio.config import incluster_config

from services.common.errors import Unavailable
from services.scheduler.cluster.deletion_costs import DeletionCosts
from services.scheduler.cluster.kubernetes_client import DELETION_COST, KubernetesClient
from services.scheduler.cluster.leader_elector import LeaderElector
from services.scheduler.cluster.lease import LeaseConflict, LeaseRecord, LeaseUnavailable
from services.scheduler.cluster.pod_directory import (
    PodDirectory,
    PodsForbidden,
    PodsRefused,
    PodState,
)
from tests.environments import PROXIES
from tests.fake_kubernetes import (
    LEASE,
    NAMESPACE,
    RUNNING,
    FakeKubernetes,
    fake_kubernetes,
    write_kubeconfig,
)
from tests.limits import HANG_S

LIMIT_S = 30
SELECTOR = "app=worker"
NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)  # no microseconds


@dataclass
class Cluster:
    """An API and a client that is connected to it."""

    api: FakeKubernetes
    client: KubernetesClient

    def elector(self, identity: str) -> LeaderElector:
        return LeaderElector(
            self.client.lease_store(NAMESPACE, LEASE),
            identity=identity,
            address="10.0.0.1:50052",
            lease_duration_s=2.0,
            retry_period_s=0.1,
        )


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeKubernetes]:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    async with fake_kubernetes() as api:
        monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(api, tmp_path)))
        yield api


@contextlib.asynccontextmanager
async def connected(api: FakeKubernetes, *, silence_limit_s: float) -> AsyncIterator[Cluster]:
    async with KubernetesClient(call_timeout_s=5, silence_limit_s=silence_limit_s) as client:
        yield Cluster(api, client)


@pytest.fixture
async def cluster(api: FakeKubernetes) -> AsyncIterator[Cluster]:
    async with connected(api, silence_limit_s=60) as cluster:
        yield cluster


def directory(cluster: Cluster, n_stages: int = 1) -> PodDirectory:
    return PodDirectory(
        cluster.client.pods(NAMESPACE, SELECTOR),
        n_stages=n_stages,
        port=50053,
        refused_limit_s=0.5,
        first_pause_s=0.01,
    )


@contextlib.asynccontextmanager
async def running(cluster: Cluster, n_stages: int = 1) -> AsyncIterator[PodDirectory]:
    pods = directory(cluster, n_stages)
    task = asyncio.create_task(pods.run())
    try:
        yield pods
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_lease_that_the_manifests_made_reads_as_nobodys(cluster: Cluster) -> None:
    store = cluster.client.lease_store(NAMESPACE, LEASE)
    record = await store.read()
    assert record == LeaseRecord(holder="", transitions=0, duration_s=0, version="101")


async def test_what_is_written_is_read_back_and_labels_stay(cluster: Cluster) -> None:
    store = cluster.client.lease_store(NAMESPACE, LEASE)
    record = await store.read()
    written = await store.write(replace(record, holder="a", transitions=3, duration_s=15))
    assert written.version != record.version
    assert await store.read() == written
    assert cluster.api.lease is not None
    metadata = cluster.api.lease["metadata"]
    assert metadata["annotations"] == {"made-by": "a manifest"}
    assert [entry["manager"] for entry in metadata["managedFields"]] == ["kubectl"]


async def test_whole_seconds_are_written_as_the_api_wants_them(cluster: Cluster) -> None:
    store = cluster.client.lease_store(NAMESPACE, LEASE)
    record = await store.read()
    await store.write(replace(record, holder="a", acquire_time=NOON, renew_time=NOON))
    assert cluster.api.lease is not None
    assert cluster.api.lease["spec"]["renewTime"] == "2026-11-20T12:00:00.000001+00:00"


async def test_a_stale_version_is_a_conflict(cluster: Cluster) -> None:
    store = cluster.client.lease_store(NAMESPACE, LEASE)
    record = await store.read()
    await store.write(replace(record, holder="a"))
    with pytest.raises(LeaseConflict):
        await store.write(replace(record, holder="b"))


async def test_a_lease_that_was_made_anew_is_a_conflict(cluster: Cluster) -> None:
    store = cluster.client.lease_store(NAMESPACE, LEASE)
    record = await store.read()
    cluster.api.create_lease()
    with pytest.raises(LeaseConflict):
        await store.write(replace(record, holder="a"))


@pytest.mark.parametrize("status", [400, 401, 403, 422, 429, 500, 503])
async def test_what_the_api_says_is_told(cluster: Cluster, status: int) -> None:
    store = cluster.client.lease_store(NAMESPACE, LEASE)
    record = await store.read()
    cluster.api.errors = {"get": status, "update": status}
    with pytest.raises(LeaseUnavailable, match=f"get lease .*{status} this server cannot get"):
        await store.read()
    with pytest.raises(LeaseUnavailable, match=f"update lease .*{status} this server cannot upd"):
        await store.write(record)


async def test_a_missing_lease_reads_as_nobodys_and_the_first_write_makes_it(
    cluster: Cluster,
) -> None:
    cluster.api.lease = None
    stores = [cluster.client.lease_store(NAMESPACE, LEASE) for _ in range(2)]
    records = [await store.read() for store in stores]
    assert records == [LeaseRecord(holder="", transitions=0, duration_s=0, version="")] * 2
    written = await stores[0].write(replace(records[0], holder="a", transitions=1))
    with pytest.raises(LeaseConflict):
        await stores[1].write(replace(records[1], holder="b", transitions=1))
    assert await stores[1].read() == written
    assert cluster.api.requests == ["get", "get", "create", "update", "get"]


async def test_a_lease_that_was_deleted_is_a_conflict_and_can_be_made_anew(
    cluster: Cluster,
) -> None:
    store = cluster.client.lease_store(NAMESPACE, LEASE)
    record = await store.read()
    cluster.api.lease = None
    with pytest.raises(LeaseConflict):
        await store.write(replace(record, holder="a"))
    await store.write(replace(await store.read(), holder="a"))
    assert (await store.read()).holder == "a"


async def test_the_right_to_create_that_is_missing_is_named(cluster: Cluster) -> None:
    cluster.api.lease = None
    cluster.api.errors["create"] = 403
    store = cluster.client.lease_store(NAMESPACE, LEASE)
    with pytest.raises(LeaseUnavailable, match="create lease orcinus/orcinus-scheduler: 403"):
        await store.write(await store.read())


async def test_an_answer_that_is_no_lease_is_unavailable(cluster: Cluster) -> None:
    cluster.api.lease = {"hello": "from a proxy"}
    with pytest.raises(LeaseUnavailable, match="no version"):
        await cluster.client.lease_store(NAMESPACE, LEASE).read()


async def test_a_slow_answer_is_not_waited_for(api: FakeKubernetes) -> None:
    api.slow["get"] = 60
    async with KubernetesClient(call_timeout_s=0.2) as client:
        with pytest.raises(LeaseUnavailable, match=r"[Tt]imeout"):
            await client.lease_store(NAMESPACE, LEASE).read()


async def test_a_connection_that_breaks_is_unavailable_and_the_next_one_works(
    cluster: Cluster,
) -> None:
    store = cluster.client.lease_store(NAMESPACE, LEASE)
    cluster.api.slow["get"] = 60
    reading = asyncio.create_task(store.read())
    for n_requests in (1, 2):  # the HTTP library tries once more by itself
        await until(lambda n=n_requests: len(cluster.api.requests) == n)  # type: ignore[misc]
        cluster.api.drop_connections()
    with pytest.raises(LeaseUnavailable, match="get lease"):
        await reading
    del cluster.api.slow["get"]
    assert (await store.read()).holder == ""


async def test_no_server_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "KUBECONFIG", str(write_kubeconfig(FakeKubernetes(host="http://127.0.0.1:1"), tmp_path))
    )
    async with KubernetesClient() as client:
        with pytest.raises(LeaseUnavailable, match=r"127\.0\.0\.1"):
            await client.lease_store(NAMESPACE, LEASE).read()


async def test_no_configuration_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(Unavailable, match="no Kubernetes API"):
        await KubernetesClient().__aenter__()


def make_certificate(directory: Path) -> None:
    """A server's certificate that vouches for itself."""
    subject = ["-subj", "/CN=kubernetes", "-addext", "subjectAltName=IP:127.0.0.1"]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", "key"]
    subprocess.run(
        ["openssl", "req", "-x509", "-days", "1", *key, *subject, "-out", "ca.crt"],
        cwd=directory,
        check=True,
        capture_output=True,
    )


class Clock:
    """A stand-in for the module `datetime`, by which the client judges a token's age."""

    def __init__(self) -> None:
        self.offset = timedelta()
        self.datetime = self
        self.timedelta = timedelta

    def now(self) -> datetime:
        """The time, and more."""
        return datetime.now() + self.offset


async def test_a_pod_uses_its_service_account_and_follows_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_certificate(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(tmp_path / "ca.crt", tmp_path / "key")
    token = tmp_path / "token"
    async with fake_kubernetes(tls) as api:
        token.write_text(api.token)
        host, port = api.host.removeprefix("https://").split(":")
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
        for name, value in PROXIES.items():  # calls inside the cluster use none
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
        monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
        monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
        clock = Clock()
        monkeypatch.setattr(incluster_config, "datetime", clock)
        async with KubernetesClient() as client:
            store = client.lease_store(NAMESPACE, LEASE)
            await store.read()
            api.token = "second-token"
            token.write_text(api.token)
            with pytest.raises(LeaseUnavailable, match="401"):
                await store.read()
            clock.offset = timedelta(minutes=2)
            await store.read()


async def test_two_electors_take_turns(cluster: Cluster) -> None:
    first, second = cluster.elector("first"), cluster.elector("second")
    assert await first.acquire() == 1
    waiting = asyncio.create_task(second.acquire())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2.5):  # longer than the lease
            await first.hold()
    assert first.is_leader
    assert not waiting.done()
    assert second.leader == "first"
    await first.release()
    async with asyncio.timeout(LIMIT_S):
        assert await waiting == 2
    assert second.is_leader


async def test_a_leader_survives_dropped_connections_and_errors(cluster: Cluster) -> None:
    elector = cluster.elector("first")
    await elector.acquire()
    holding = asyncio.create_task(elector.hold())
    cluster.api.drop_connections()
    await until(lambda: cluster.api.requests.count("update") >= 3)
    cluster.api.errors["update"] = 503
    n_updates = cluster.api.requests.count("update")
    await until(lambda: cluster.api.requests.count("update") >= n_updates + 3)
    cluster.api.errors.clear()
    version = cluster.api.version
    await until(lambda: cluster.api.version >= version + 3)
    assert elector.is_leader
    assert not holding.done()
    holding.cancel()


@pytest.mark.thorough
async def test_a_leader_whose_api_server_hangs_goes_on_and_releases_in_bounded_time(
    cluster: Cluster,
) -> None:
    elector = cluster.elector("first")
    await elector.acquire()
    cluster.api.slow["update"] = 60
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3):  # longer than the lease
            await elector.hold()
    assert elector.is_leader
    cluster.api.slow["get"] = 60
    async with asyncio.timeout(LIMIT_S):
        await elector.release()
    assert not elector.is_leader


@pytest.mark.parametrize("is_applied", [True, False], ids=["made anew", "deleted"])
async def test_a_lease_made_anew_stays_its_leaders_and_counts_on(
    cluster: Cluster, is_applied: bool
) -> None:
    elector = cluster.elector("first")
    cluster.api.create_lease(leaseTransitions=6)
    assert await elector.acquire() == 7
    cluster.api.lease = None
    if is_applied:
        cluster.api.create_lease()
    holding = asyncio.create_task(elector.hold())
    await until(
        lambda: cluster.api.lease is not None and "holderIdentity" in cluster.api.lease["spec"]
    )
    assert cluster.api.lease is not None
    assert cluster.api.lease["spec"]["leaseTransitions"] == 7
    assert await elector.advance(7) == 8
    assert not holding.done()
    holding.cancel()


async def test_the_lease_says_where_its_holder_listens_and_forgets_it_when_given_back(
    cluster: Cluster,
) -> None:
    elector = cluster.elector("first")
    await elector.acquire()
    store = cluster.client.lease_store(NAMESPACE, LEASE)
    assert (await store.read()).address == "10.0.0.1:50052"
    await elector.release()
    record = await store.read()
    assert (record.address, record.is_released) == ("", True)
    assert cluster.api.lease is not None
    assert cluster.api.lease["metadata"]["annotations"] == {
        "made-by": "a manifest",
        "orcinus/released": "true",
    }
    await elector.acquire()
    assert not (await store.read()).is_released


@pytest.mark.parametrize(
    ("states", "state"),
    [
        ([RUNNING], PodState.RUNS),
        ([{"waiting": {"reason": "CrashLoopBackOff"}}], PodState.IDLE),
        ([{"terminated": {"exitCode": 137}}], PodState.IDLE),
        ([{"terminated": {"exitCode": 137}}, RUNNING], PodState.RUNS),
        ([], PodState.IDLE),
    ],
    ids=["running", "waiting", "terminated", "one of two runs", "not started"],
)
async def test_a_pod_runs_while_one_of_its_containers_does(
    cluster: Cluster, states: list[dict[str, object]], state: PodState
) -> None:
    cluster.api.set_pod("scheduler-0", states=states)
    cluster.api.set_pod("scheduler-1", states=[RUNNING])

    async def ask(name: str, uid: str) -> PodState:
        return await cluster.client.pod_state(NAMESPACE, name, uid)

    assert await ask("scheduler-0", "scheduler-0-uid") is state
    assert await ask("scheduler-1", "scheduler-1-uid") is PodState.RUNS
    assert await ask("scheduler-1", "the uid of the one before") is PodState.GONE
    assert await ask("scheduler-2", "scheduler-2-uid") is PodState.GONE
    cluster.api.errors["list"] = 403
    with pytest.raises(PodsRefused, match="list pod scheduler-0 in namespace orcinus: 403"):
        await ask("scheduler-0", "scheduler-0-uid")


LEADER = """
import asyncio, sys
from services.common import process
from services.scheduler.cluster.deletion_costs import DeletionCosts
from services.scheduler.cluster.kubernetes_client import DELETION_COST, KubernetesClient
from services.scheduler.cluster.leader_elector import LeaderElector
from services.scheduler.cluster.leadership import LeadershipLost

async def main():
    async with KubernetesClient() as client:
        elector = LeaderElector(
            client.lease_store("orcinus", "orcinus-scheduler"), identity="stopped",
            lease_duration_s=2.0, retry_period_s=0.1,
        )
        await elector.acquire()
        print("leads", flush=True)
        try:
            await elector.hold()
        except LeadershipLost as loss:
            print(loss, flush=True)
    return 0

sys.exit(process.run(main()))
"""


@pytest.mark.system
@pytest.mark.thorough
async def test_a_process_that_was_stopped_learns_that_another_leads_when_it_wakes(
    cluster: Cluster,
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LEADER, stdout=asyncio.subprocess.PIPE, env=_environment()
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(HANG_S):
            assert await process.stdout.readline() == b"leads\n"
            process.send_signal(signal.SIGSTOP)
            standby = cluster.elector("standby")
            assert await standby.acquire() == 2
            process.send_signal(signal.SIGCONT)
            loss = (await process.stdout.read()).decode()
            status = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert status == 0
    assert loss == "stopped does not lead any more: standby holds the lease\n"
    assert standby.is_leader


def _environment() -> dict[str, str]:
    root = Path(__file__).parents[3]
    return os.environ | {"PYTHONPATH": os.pathsep.join((str(root), str(root / "protos/gen")))}


async def test_pods_are_found_followed_and_told_apart_by_their_labels(cluster: Cluster) -> None:
    cluster.api.set_pod("worker-1", ip="10.0.0.2")
    cluster.api.set_pod("frontend-0", ip="10.0.0.3", labels={"app": "frontend"})
    async with running(cluster, 2) as pods:
        await until(lambda: pods.addresses() == ["10.0.0.2:50053"])
        cluster.api.set_pod("frontend-0", ip="10.0.0.4", labels={"app": "frontend"})
        cluster.api.set_pod("worker-0")
        cluster.api.set_pod("worker-0", ip="10.0.0.1")
        await until(lambda: pods.addresses() == ["10.0.0.1:50053", "10.0.0.2:50053"])
        cluster.api.set_pod("worker-1", ip="10.0.0.2", deleted="2026-11-20T11:00:00Z")
        await until(lambda: pods.addresses() == ["10.0.0.1:50053"])
        cluster.api.delete_pod("worker-1")
        cluster.api.set_pod("worker-1", uid="another", ip="10.0.0.9")
        await until(lambda: pods.addresses() == ["10.0.0.1:50053", "10.0.0.9:50053"])
    assert cluster.api.requests == ["list", "watch"]


async def test_a_watch_goes_on_from_its_last_bookmark(cluster: Cluster) -> None:
    async with running(cluster) as pods:
        await until(lambda: cluster.api.n_watches == 1)
        cluster.api.bookmark()
        await until(lambda: cluster.api.n_sent == 1)
        # A watch that has not seen the bookmark has to list again.
        cluster.api.compacted = cluster.api.version
        cluster.api.end_watches()
        await until(lambda: cluster.api.requests == ["list", "watch", "watch"])
        cluster.api.set_pod("worker-0", ip="10.0.0.1")
        await until(lambda: pods.addresses() == ["10.0.0.1:50053"])


async def test_a_version_that_is_gone_has_pods_listed_again(cluster: Cluster) -> None:
    async with running(cluster) as pods:
        await until(lambda: cluster.api.n_watches == 1)
        cluster.api.compact()
        cluster.api.watch_errors = [410]
        cluster.api.end_watches()
        # Refused with status 410, then, after a list, by an event.
        requests = ["list", "watch", "watch", "list", "watch", "list", "watch"]
        await until(lambda: cluster.api.requests == requests)
        cluster.api.set_pod("worker-0", ip="10.0.0.1")
        await until(lambda: pods.addresses() == ["10.0.0.1:50053"])


@pytest.mark.parametrize("trouble", ["drop", "garbage", "error event", "503", "429", "silence"])
async def test_the_directory_gets_over(
    api: FakeKubernetes, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    api.set_pod("worker-0", ip="10.0.0.1")
    async with connected(api, silence_limit_s=1.0) as cluster, running(cluster) as pods:
        await until(lambda: api.n_watches == 1)
        if trouble == "garbage":
            api.send_garbage()
        elif trouble == "error event":
            api.watch_errors = [500]
        elif trouble in ("429", "503"):
            api.errors = {"list": int(trouble), "watch": int(trouble)}
        if trouble in ("drop", "error event", "429", "503"):
            api.drop_connections()
        if trouble in ("429", "503"):
            await until(lambda: api.requests.count("list") >= 3)
            api.errors.clear()
        await until(lambda: api.requests.count("list") >= 2)
        assert pods.addresses() == ["10.0.0.1:50053"]
        api.set_pod("worker-0", uid="another", ip="10.0.0.2", created="2026-11-20T11:00:00Z")
        await until(lambda: pods.addresses() == ["10.0.0.2:50053"])
    expected = {
        "drop": "watch pods",
        "garbage": "unknown type, GREETING",
        "error event": "500 too old",
        "503": "503 this server",
        "429": "429 this server",
        "silence": "TimeoutError",
    }
    assert expected[trouble] in caplog.text


@pytest.mark.parametrize("verb", ["list", "watch"])
@pytest.mark.parametrize("status", [401, 403])
async def test_a_missing_right_is_named(cluster: Cluster, verb: str, status: int) -> None:
    cluster.api.errors[verb] = status
    expected = f"cannot {verb} pods in namespace orcinus: {status} this server cannot {verb}"
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(PodsForbidden, match=expected):
            await directory(cluster).run()


async def test_deletion_costs_are_written_when_they_change_and_a_refusal_is_harmless(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    api = cluster.api

    def written() -> dict[str, str | None]:
        return {
            name: item["metadata"].get("annotations", {}).get(DELETION_COST)
            for name, item in api.pods.items()
        }

    api.set_pod("a", ip="10.0.0.1")
    api.set_pod("b", ip="10.0.0.2")
    api.errors["patch"] = 403
    async with running(cluster) as pods:
        await until(lambda: len(pods.addresses()) == 2)
        write = partial(cluster.client.set_deletion_cost, NAMESPACE)
        costs = DeletionCosts(pods.pods, write, retry_s=0.05)
        task = asyncio.create_task(costs.run())
        costs.note({"10.0.0.1:50053": 1000})
        await until(lambda: api.requests.count("patch") > 1)
        assert "403 this server cannot patch today" in caplog.text
        assert not task.done()
        del api.errors["patch"]
        await until(lambda: written() == {"a": "1000", "b": "0"})
        n_patches = api.requests.count("patch")
        costs.note({"10.0.0.1:50053": 1000, "10.0.0.2:50053": 999})
        await until(lambda: written() == {"a": "1000", "b": "999"})
        assert api.requests.count("patch") == n_patches + 1
        task.cancel()
        await asyncio.wait((task,))
