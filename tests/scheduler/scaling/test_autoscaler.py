"""The autoscaler on a store that a test controls, and on an API on a real socket."""

import logging
from pathlib import Path

import pytest

from services.scheduler.cluster.kubernetes_client import KubernetesClient
from services.scheduler.cluster.replicas import ReplicasUnavailable
from services.scheduler.scaling.autoscaler import MAX_PAUSE_S, READ_S, Autoscaler
from services.scheduler.scaling.load import Load
from services.scheduler.scaling.size import SizeLimits
from tests.fake_kubernetes import DEPLOYMENT, NAMESPACE, fake_kubernetes, write_kubeconfig

LONG_QUEUE = Load(n_serving=1, n_waiting=9, n_queued_tokens=900, queue_s=25.0, n_running=4)


class Store:
    """A number of workers, and how often it was read and written."""

    def __init__(self, n_workers: int) -> None:
        self.n_workers = n_workers
        self.is_broken = False
        self.calls: list[str] = []

    async def read(self) -> int:
        self._note("read")
        return self.n_workers

    async def write(self, n_workers: int) -> None:
        self._note(f"write {n_workers}")
        self.n_workers = n_workers

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if self.is_broken:
            raise ReplicasUnavailable("503 not today")


class World:
    """An autoscaler, its store, the load, and a clock."""

    def __init__(self, n_workers: int, *, n_spare_workers: int = 0, least: int = 0) -> None:
        self.now = 0.0
        self.load = Load(n_serving=1, n_running=1)
        self.wanted: list[int] = []
        self.store = Store(n_workers)
        self.scaler = Autoscaler(
            self.store,
            SizeLimits(
                min_pipelines=least,
                max_pipelines=3,
                queue_goal_s=10.0,
                scale_down_after_s=60.0,
                sleep_after_s=60.0,
            ),
            n_stages=2,
            n_spare_workers=n_spare_workers,
            measure=lambda _: self.load,
            on_wanted=self.wanted.append,
            clock=lambda: self.now,
        )

    async def look(self, *, after_s: float = 0.5) -> None:
        self.now += after_s
        await self.scaler.look()


async def test_a_new_leader_takes_over_the_number_that_it_finds() -> None:
    it = World(4)
    await it.look()
    await it.look()
    assert it.wanted == [2, 2]
    assert it.store.calls == ["read"]


@pytest.mark.parametrize(
    ("found", "spares", "wanted"), [(5, 0, 4), (9, 0, 6), (2, 1, 3), (3, 1, 3), (0, 1, 3)]
)
async def test_there_are_whole_pipelines_within_the_limits_and_spares(
    found: int, spares: int, wanted: int
) -> None:
    it = World(found, n_spare_workers=spares, least=1)
    await it.look()
    assert it.store.n_workers == wanted


async def test_each_change_is_one_line_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    it = World(2)
    await it.look()
    it.load = LONG_QUEUE
    await it.look()
    await it.look()
    assert it.store.calls == ["read", "write 6"]
    assert [record.message for record in caplog.records] == [
        "3 pipelines are wanted instead of 1, with 6 workers: 9 requests with 900 tokens wait, and "
        "the last would begin in 25.0 s, which is more than 10 s"
    ]


async def test_a_model_that_is_asleep_has_no_spares_either() -> None:
    it = World(3, n_spare_workers=1)
    it.load = Load(n_serving=1)
    await it.look()
    assert not it.scaler.is_asleep
    await it.look(after_s=60)
    assert it.scaler.is_asleep
    assert (it.store.n_workers, it.wanted[-1]) == (0, 0)
    it.load = Load(n_held=1)
    await it.look()
    assert (it.store.n_workers, it.wanted[-1]) == (3, 1)


async def test_a_number_that_something_else_has_set_is_set_again() -> None:
    it = World(4)
    await it.look()
    it.store.n_workers = 1
    await it.look()
    assert it.store.n_workers == 1
    await it.look(after_s=READ_S)
    assert it.store.n_workers == 4


async def test_calls_that_fail_are_tried_again_with_growing_pauses(
    caplog: pytest.LogCaptureFixture,
) -> None:
    it = World(2)
    it.store.is_broken = True
    for _ in range(400):
        await it.look()
    assert it.wanted == []
    assert 5 < len(it.store.calls) < 15
    it.store.is_broken = False
    await it.look(after_s=MAX_PAUSE_S)
    it.load, it.store.is_broken = LONG_QUEUE, True
    await it.look()
    assert it.wanted[-1] == 3
    it.store.is_broken = False
    await it.look(after_s=2.0)
    assert it.store.n_workers == 6
    warnings = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    assert warnings == ["the number of workers cannot be set: 503 not today"]


async def test_the_scale_of_a_deployment_is_read_and_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_kubernetes() as api:
        monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(api, tmp_path)))
        async with KubernetesClient() as client:
            scale = client.scale(NAMESPACE, DEPLOYMENT)
            with pytest.raises(ReplicasUnavailable, match=r"cannot get .* 404 .*found"):
                await scale.read()
            for n_replicas in (6, 0):  # an API server leaves 0 out
                api.n_replicas = 3
                await scale.write(n_replicas)
                assert api.n_replicas == n_replicas
                assert await scale.read() == n_replicas
            api.errors["patch-scale"] = 403
            with pytest.raises(ReplicasUnavailable, match=r"cannot patch the scale of .* 403"):
                await scale.write(1)
            assert api.n_replicas == 0
