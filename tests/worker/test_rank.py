"""A rank's loop over a real socket pair, with a runner that computes nothing and peers that may
fail."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from orcinus.v1 import worker_pb2

from services.worker.channel import ChannelClosed, MessageKind
from services.worker.channel import RankEnd as End
from services.worker.epoch_member import EpochMember
from services.worker.input_batch import IterationPlan
from services.worker.models.tensor_parallel import SINGLE, TensorParallel
from services.worker.rank import Rank
from services.worker.transport import TransferError


class Runner:
    """Takes any plan; hidden states are zeros, every token is 7."""

    def __init__(self) -> None:
        self.may_compute = threading.Event()
        self.may_compute.set()
        self.is_computing = threading.Event()
        self.on_compute: Callable[[], None] = lambda: None

    def prepare(self, plan: IterationPlan) -> IterationPlan:
        return plan

    def empty_hidden(self, n_tokens: int) -> torch.Tensor:
        return torch.empty(n_tokens, 4)

    def forward(self, batch: IterationPlan, hidden: torch.Tensor | None) -> torch.Tensor:
        self.is_computing.set()
        assert self.may_compute.wait(5)
        self.on_compute()
        return torch.zeros(sum(batch.n_tokens), 4)

    def sample(self, batch: IterationPlan, hidden: torch.Tensor) -> torch.Tensor:
        return torch.full((sum(batch.sample),), 7)


@dataclass
class Receipt:
    """A receive that comes at once, or never."""

    is_broken: bool

    def wait(self) -> None:
        if self.is_broken:
            raise TransferError("nothing from rank 0")


@dataclass
class Peers:
    """Neighbours that break on the iterations they are told to."""

    broken: set[int] = field(default_factory=set)
    sent: list[int] = field(default_factory=list)
    started: list[int] = field(default_factory=list)
    is_closed: bool = False

    @property
    def tensor_parallel(self) -> TensorParallel:
        return SINGLE

    def start_receive(self, hidden: torch.Tensor, iteration: int) -> "Receipt":
        self.started.append(iteration)
        return Receipt(is_broken=iteration in self.broken)

    def send(self, hidden: torch.Tensor, iteration: int) -> None:
        self.sent.append(iteration)

    def close(self) -> None:
        self.is_closed = True


@dataclass
class World:
    """The controller's end, and the peers of every epoch the rank has joined."""

    controller: End
    runner: Runner
    peers: list[Peers]
    broken: set[int]
    unreachable: set[int]

    def read(self) -> tuple[MessageKind, bytes]:
        frame = self.controller.receive(5)
        assert frame is not None
        return frame

    def join(self, epoch: int, *, stage_index: int = 1, n_stages: int = 2) -> MessageKind:
        request = worker_pb2.JoinPipelineRequest(
            pipeline_id="p", epoch=epoch, stage_index=stage_index, members=["x"] * n_stages
        )
        self.controller.send(MessageKind.JOIN, request.SerializeToString())
        while (kind := self.read()[0]) is MessageKind.REPORT:
            pass  # signs of life of the epoch before
        return kind

    def plan(self, epoch: int, iteration: int) -> None:
        message = worker_pb2.RunIterationsRequest(
            pipeline_id="p", epoch=epoch, iteration=iteration, row=[0], n_tokens=[3], sample=[True]
        )
        self.controller.send(MessageKind.PLAN, message.SerializeToString())

    def report(self) -> worker_pb2.WatchStageResponse:
        """The next report that is more than a sign of life."""
        while True:
            kind, payload = self.read()
            assert kind is MessageKind.REPORT
            report = worker_pb2.WatchStageResponse.FromString(payload)
            if not report.HasField("timings") or report.timings.timings:
                return report


@contextlib.contextmanager
def running_rank() -> Iterator[World]:
    ours, theirs = socket.socketpair()
    world = World(End(ours), Runner(), [], set(), set())

    def join(request: worker_pb2.JoinPipelineRequest) -> EpochMember:
        if request.epoch in world.unreachable:
            raise TransferError("no process group")
        world.peers.append(Peers(world.broken))
        return EpochMember(request, world.runner, world.peers[-1])

    rank = Rank(
        End(theirs),
        worker_pb2.DescribeResponse(model="fake"),
        rendezvous=None,
        report_results=True,
        join=join,
    )

    def serve() -> None:
        with contextlib.suppress(ChannelClosed):
            rank.serve()

    thread = threading.Thread(target=serve)
    thread.start()
    kind, payload = world.read()
    assert kind is MessageKind.LOADED
    assert worker_pb2.DescribeResponse.FromString(payload).model == "fake"
    yield world
    ours.close()
    thread.join(5)
    theirs.close()
    assert not thread.is_alive()


def test_the_last_stage_reports_tokens_and_another_stage_timings() -> None:
    with running_rank() as world:
        assert world.join(1) is MessageKind.JOINED
        world.plan(1, 1)
        result = world.report().result
        assert (result.iteration, list(result.token_ids)) == (1, [7])
        assert result.timing.compute_ns > 0
        assert world.join(2, stage_index=0) is MessageKind.JOINED
        world.plan(2, 1)
        [timing] = world.report().timings.timings
        assert (timing.iteration, world.peers[-1].sent) == (1, [1])


def test_a_plan_of_another_epoch_is_never_run() -> None:
    with running_rank() as world:
        world.plan(1, 1)  # before any epoch
        assert world.join(2) is MessageKind.JOINED
        world.plan(1, 5)
        world.plan(3, 6)
        world.plan(2, 7)
        assert world.report().result.iteration == 7


def test_a_lost_neighbour_ends_the_epoch_and_the_next_one_works() -> None:
    with running_rank() as world:
        world.broken.add(4)
        assert world.join(1) is MessageKind.JOINED
        world.plan(1, 4)
        report = world.report()
        assert (report.epoch, report.failure.reason) == (1, "nothing from rank 0")
        assert world.peers[0].is_closed
        world.plan(1, 5)  # still under way when the epoch ended
        assert world.join(2) is MessageKind.JOINED
        world.plan(2, 1)
        assert world.report().result.iteration == 1


def test_an_epoch_that_cannot_be_joined_is_said_and_survived() -> None:
    with running_rank() as world:
        world.unreachable.add(1)
        assert world.join(1) is MessageKind.NOT_JOINED
        assert world.join(2) is MessageKind.JOINED


def test_an_idle_rank_gives_signs_of_life() -> None:
    with running_rank() as world:
        assert world.join(1) is MessageKind.JOINED
        for _ in range(2):
            kind, payload = world.read()
            assert kind is MessageKind.REPORT
            assert worker_pb2.WatchStageResponse.FromString(payload).HasField("timings")


def test_activations_of_later_iterations_are_received_while_one_computes() -> None:
    with running_rank() as world:
        assert world.join(1) is MessageKind.JOINED
        world.runner.may_compute.clear()
        world.plan(1, 1)
        while not world.runner.is_computing.is_set():
            time.sleep(0.001)
        for iteration in (2, 3, 4):
            world.plan(1, iteration)
        world.runner.on_compute = lambda: started.append(list(world.peers[0].started))
        started: list[list[int]] = []
        world.runner.may_compute.set()
        assert [world.report().result.iteration for _ in range(4)] == [1, 2, 3, 4]
    assert started[1] == [1, 2, 3, 4], "all had been started when the second began to compute"
