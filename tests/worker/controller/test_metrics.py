"""A stage's metrics, read from a controller whose ranks a test plays."""

import pytest
from orcinus.v1 import worker_pb2
from prometheus_client import CollectorRegistry

from services.worker.channel import MessageKind
from services.worker.controller.controller import Controller
from services.worker.controller.metrics import WorkerMetrics
from services.worker.controller.rank_watch import CHECK_S, RECENTLY_S
from tests.exposition import Samples
from tests.fakes import FakeRank, fake_stage


class World:
    """A controller of two ranks, and what it tells Prometheus."""

    def __init__(self) -> None:
        self.controller = Controller(tp_size=2)
        self.controller.attach([FakeRank(self.controller), FakeRank(self.controller)])
        self.registry = CollectorRegistry()
        self.registry.register(WorkerMetrics(self.controller))

    @property
    def samples(self) -> Samples:
        return Samples.of(self.registry)


async def test_weights_of_all_ranks_are_added_up() -> None:
    it = World()
    it.controller.on_message(0, MessageKind.PROGRESS, b"30 100")
    it.controller.on_message(1, MessageKind.PROGRESS, b"50 100")
    assert it.samples.sum("orcinus_worker_weights_loaded_bytes") == 80
    assert it.samples.sum("orcinus_worker_weights_bytes") == 200


async def test_a_rank_that_falls_silent_is_no_longer_alive() -> None:
    it = World()
    assert it.samples.sum("orcinus_worker_ranks") == 2
    assert it.samples.sum("orcinus_worker_ranks_alive") == 0
    for _ in range(3):
        it.controller.on_message(0, MessageKind.HEARTBEAT, b"")
        it.controller.rank_watch.check(60)
        it.controller.rank_watch.beat()
    assert it.samples.sum("orcinus_worker_heartbeats_total") == 0  # the other has given none
    for _ in range(2):
        for tp_rank in (0, 1):
            it.controller.on_message(tp_rank, MessageKind.HEARTBEAT, b"")
        it.controller.rank_watch.check(60)
        it.controller.rank_watch.beat()
    assert it.samples.sum("orcinus_worker_heartbeats_total") == 2
    assert it.samples.sum("orcinus_worker_ranks_alive") == 2
    for _ in range(round(RECENTLY_S / CHECK_S)):
        it.controller.on_message(0, MessageKind.HEARTBEAT, b"")
        it.controller.rank_watch.check(60)
    assert it.samples.sum("orcinus_worker_ranks_alive") == 1
    assert it.samples.sum("orcinus_worker_heartbeats_total") == 2


@pytest.mark.parametrize("n_plans", [0, 3])
async def test_plans_are_counted_when_they_are_forwarded(n_plans: int) -> None:
    it = World()
    for _ in range(n_plans):
        await it.controller.plans.forward(b"plan")
    assert it.samples.sum("orcinus_worker_plans_total") == n_plans


async def test_the_epoch_is_the_one_it_joined() -> None:
    async with fake_stage() as stage:
        request = worker_pb2.JoinPipelineRequest(epoch=4, members=[stage.address], tp_size=1)
        await stage.controller.join(request)
        registry = CollectorRegistry()
        registry.register(WorkerMetrics(stage.controller))
        assert Samples.of(registry).sum("orcinus_worker_epoch") == 4
