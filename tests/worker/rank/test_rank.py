"""A rank's loop over a real socket pair, with a runner that computes nothing and peers that may
fail."""

import contextlib
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import pytest
import torch
from orcinus.v1 import worker_pb2

from kernels.forms.logits import Logits
from services.worker.channel import ChannelClosed, MessageKind
from services.worker.channel import RankEnd as End
from services.worker.engine.kv_record import RECORD_BYTES, KVRecord
from services.worker.engine.last_tokens import Numbers
from services.worker.engine.plan import IterationPlan, PlanError
from services.worker.models.tensor_parallel import SINGLE, TensorParallel
from services.worker.rank.data_plane.transport import TransferError, Transport
from services.worker.rank.device_clock import DeviceClock
from services.worker.rank.epoch_member import EpochMember
from services.worker.rank.kv_journal import NO_JOURNAL, Journal, KVJournal
from services.worker.rank.membership import Membership
from services.worker.rank.rank import Rank
from tests.worker.rank.test_epoch_member import SlowDevice


class Runner:
    """Takes any plan; hidden states are zeros, every token is 7."""

    def __init__(self) -> None:
        self.may_compute = threading.Event()
        self.may_compute.set()
        self.is_computing = threading.Event()
        self.on_compute: Callable[[], object] = lambda: None
        self.tokens = [7]

    def prepare(self, plan: IterationPlan) -> IterationPlan:
        return plan

    def empty_hidden(self, n_tokens: Sequence[int]) -> torch.Tensor:
        return torch.empty(sum(n_tokens), 4)

    def forward(self, batch: IterationPlan, hidden: torch.Tensor | None) -> torch.Tensor:
        self.is_computing.set()
        assert self.may_compute.wait(30)
        self.on_compute()
        return torch.zeros(sum(batch.n_tokens), 4)

    def logits(self, batch: IterationPlan, hidden: torch.Tensor | None) -> Logits:
        return Logits(self.forward(batch, hidden))

    def sample(self, batch: IterationPlan, logits: Logits) -> torch.Tensor:
        return torch.tensor(self.tokens[: sum(batch.sample)])

    def cut(self, batch: IterationPlan) -> list[int]:
        return []

    def logprobs(self, batch: IterationPlan, logits: Logits, tokens: Numbers) -> None:
        return None

    def vectors(self, batch: IterationPlan, logits: Logits) -> None:
        """Returns None: no request wants a vector."""

    def close(self) -> None:
        pass


@dataclass
class Receipt:
    """A receive that comes at once, or breaks, or waits for ever."""

    is_broken: bool
    is_silent: bool
    is_aborted: threading.Event

    def wait(self) -> None:
        if self.is_silent:
            assert self.is_aborted.wait(30)
        if self.is_broken or self.is_silent:
            raise TransferError("nothing from rank 0")


@dataclass
class Peers:
    """Neighbours that break, or fall silent, on the iterations they are told to."""

    broken: set[int]
    silent: set[int]
    is_aborted: threading.Event = field(default_factory=threading.Event)
    sent: list[int] = field(default_factory=list)
    started: list[int] = field(default_factory=list)
    is_closed: bool = False

    @property
    def tensor_parallel(self) -> TensorParallel:
        return SINGLE

    def warm_up(self) -> None:
        pass

    def start_receive(self, hidden: torch.Tensor, iteration: int) -> "Receipt":
        self.started.append(iteration)
        return Receipt(iteration in self.broken, iteration in self.silent, self.is_aborted)

    def send(self, hidden: torch.Tensor, iteration: int) -> None:
        self.sent.append(iteration)

    def abort(self) -> None:
        self.is_aborted.set()

    def close(self) -> None:
        self.is_closed = True


@dataclass
class World:
    """The controller's end, and the peers of every epoch the rank has joined."""

    controller: End
    runner: Runner
    rank: Rank
    peers: list[Peers] = field(default_factory=list)
    members: list[weakref.ref[EpochMember]] = field(default_factory=list)
    broken: set[int] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)
    unreachable: set[int] = field(default_factory=set)
    hanging: set[int] = field(default_factory=set)
    is_connecting: threading.Event = field(default_factory=threading.Event)
    may_connect: threading.Event = field(default_factory=threading.Event)
    on_enter: Callable[[], None] = lambda: None
    journal: Journal = NO_JOURNAL
    died_of: str = ""

    def read(self) -> tuple[MessageKind, bytes]:
        frame = self.controller.receive(30)
        assert frame is not None
        return frame

    def join(self, epoch: int, *, stage_index: int = 1, n_stages: int = 2) -> MessageKind:
        """Makes it join, and says whether it has."""
        self.tell_to_join(epoch, stage_index=stage_index, n_stages=n_stages)
        while True:
            kind, payload = self.read()
            if kind is not MessageKind.REPORT and int(payload.split()[0]) == epoch:
                return kind

    def tell_to_join(self, epoch: int, *, stage_index: int = 1, n_stages: int = 2) -> None:
        request = worker_pb2.JoinPipelineRequest(
            pipeline_id="p", epoch=epoch, stage_index=stage_index, members=["x"] * n_stages
        )
        self.controller.send(MessageKind.JOIN, request.SerializeToString())

    def plan(self, epoch: int, iteration: int, *, n_spans: int = 1) -> None:
        message = worker_pb2.RunIterationsRequest(
            pipeline_id="p",
            epoch=epoch,
            iteration=iteration,
            row=range(n_spans),
            n_tokens=[3] * n_spans,
            sample=[True] * n_spans,
        )
        self.controller.send(MessageKind.PLAN, message.SerializeToString())

    def report(self) -> worker_pb2.WatchStageResponse:
        """The next frame, which must be a report."""
        kind, payload = self.read()
        assert kind is MessageKind.REPORT
        return worker_pb2.WatchStageResponse.FromString(payload)


class LateGrammars:
    """Compiles a grammar when the test lets it."""

    def __init__(self) -> None:
        self.may_compile = threading.Event()
        self.kept: Collection[bytes] = ()

    def prepare(
        self,
        digest: bytes,
        grammar: str,
        *,
        kept: Collection[bytes],
        on_end: Callable[[str], None],
    ) -> None:
        self.kept = kept

        def compile_later() -> None:
            assert self.may_compile.wait(30)
            on_end(f"nothing follows {grammar}")

        threading.Thread(target=compile_later).start()


@contextlib.contextmanager
def running_rank(
    clock: DeviceClock | None = None, grammars: LateGrammars | None = None
) -> Iterator[World]:
    ours, theirs = socket.socketpair()

    def connect(request: worker_pb2.JoinPipelineRequest) -> Transport:
        if request.epoch in world.unreachable:
            raise TransferError("no process group")
        world.is_connecting.set()
        if request.epoch in world.hanging:
            assert world.may_connect.wait(30)
        world.peers.append(Peers(world.broken, world.silent))
        return world.peers[-1]

    def enter(request: worker_pb2.JoinPipelineRequest, peers: Transport) -> EpochMember:
        world.on_enter()
        member = EpochMember(request, world.runner, peers, clock, journal=world.journal)
        world.members.append(weakref.ref(member))
        return member

    rank = Rank(
        End(theirs),
        worker_pb2.DescribeResponse(model="fake"),
        Membership(connect=connect, enter=enter),
        rendezvous=None,
        report_results=True,
        grammars=grammars,
    )
    world = World(End(ours), Runner(), rank)

    def serve() -> None:
        try:
            rank.serve()
        except ChannelClosed:
            pass
        except RuntimeError as error:
            world.died_of = str(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        kind, payload = world.read()
        assert kind is MessageKind.LOADED
        assert worker_pb2.DescribeResponse.FromString(payload).model == "fake"
        yield world
    finally:  # also after a failure, or the thread would keep the process from its end
        ours.close()
        thread.join(30)
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
        assert report.failure.is_of_neighbour
        assert world.peers[0].is_closed
        world.plan(1, 5)  # still under way when the epoch ended
        assert world.join(2) is MessageKind.JOINED
        world.plan(2, 1)
        assert world.report().result.iteration == 1


def test_nothing_keeps_the_member_of_an_epoch_when_the_next_one_begins() -> None:
    left: list[object] = []
    with running_rank() as world:
        world.on_enter = lambda: left.extend(member() for member in world.members)
        assert world.join(1) is MessageKind.JOINED
        world.plan(1, 1)
        assert world.report().result.iteration == 1
        assert world.join(2) is MessageKind.JOINED
    assert left == [None], "its K/V would take the room of those of the next one"


def test_an_epoch_that_cannot_be_joined_is_said_and_survived() -> None:
    with running_rank() as world:
        world.unreachable.add(1)
        assert world.join(1) is MessageKind.NOT_JOINED
        assert world.join(2) is MessageKind.JOINED


def test_an_epoch_that_is_lost_while_decodes_are_recorded_is_said_and_survived() -> None:
    def lose() -> None:
        raise TransferError("a rank of this stage does not answer")

    with running_rank() as world:
        world.on_enter = lose
        world.tell_to_join(1)
        said = (MessageKind.NOT_JOINED, b"1 a rank of this stage does not answer")
        assert world.read() == said
        world.on_enter = lambda: None
        assert world.join(2) is MessageKind.JOINED


def test_an_epoch_that_is_called_off_while_decodes_are_recorded_is_not_joined() -> None:
    with running_rank() as world:
        world.on_enter = lambda: world.rank.membership.leave_before(2)
        assert world.join(1) is MessageKind.NOT_JOINED
        while not world.peers[0].is_closed:
            time.sleep(0.001)
        assert world.join(2) is MessageKind.JOINED
        world.plan(2, 1)
        assert world.report().result.iteration == 1


def test_a_rank_that_waits_for_a_silent_neighbour_leaves_when_told_to() -> None:
    with running_rank() as world:
        world.silent.add(4)
        assert world.join(1) is MessageKind.JOINED
        world.plan(1, 4)
        world.rank.membership.leave_before(2)
        while not world.peers[0].is_closed:
            time.sleep(0.001)
        assert world.join(2) is MessageKind.JOINED
        world.rank.membership.leave_before(2)  # that of the current epoch, once more
        world.plan(2, 1)
        assert world.report().result.iteration == 1


def test_joining_in_vain_does_not_keep_a_rank_from_the_next_epoch() -> None:
    with running_rank() as world:
        world.hanging.add(1)
        world.tell_to_join(1)
        assert world.is_connecting.wait(30)
        world.rank.membership.leave_before(2)
        assert world.read() == (MessageKind.NOT_JOINED, b"1 epoch 1 is over")
        assert world.join(2) is MessageKind.JOINED
        world.may_connect.set()  # too late
        while len(world.peers) < 2 or not world.peers[1].is_closed:
            time.sleep(0.001)
        world.plan(2, 1)
        assert world.report().result.iteration == 1
        assert not world.peers[0].is_closed


def test_an_epoch_that_is_over_before_it_was_joined_is_not_tried() -> None:
    with running_rank() as world:
        world.rank.membership.leave_before(3)
        assert world.join(2) is MessageKind.NOT_JOINED
        assert not world.peers
        assert world.join(3) is MessageKind.JOINED


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


def test_a_rank_goes_on_while_its_device_computes() -> None:
    device = SlowDevice()
    with running_rank(device) as world:
        assert world.join(1, stage_index=0, n_stages=1) is MessageKind.JOINED
        for iteration in (1, 2, 3):
            world.runner.is_computing.clear()
            world.plan(1, iteration)
            assert world.runner.is_computing.wait(30), "the one before has not been reported"
        device.n_passed = 10**6
        assert [world.report().result.iteration for _ in range(3)] == [1, 2, 3]


def test_a_rank_that_has_nothing_to_do_leaves_when_told_to() -> None:
    with running_rank() as world:
        assert world.join(1) is MessageKind.JOINED
        world.rank.membership.leave_before(2)
        while not world.peers[0].is_closed:
            time.sleep(0.001)
        assert world.join(2) is MessageKind.JOINED


def test_a_rank_whose_device_computes_leaves_when_told_to() -> None:
    device = SlowDevice()
    with running_rank(device) as world:
        assert world.join(1, stage_index=0, n_stages=1) is MessageKind.JOINED
        world.plan(1, 1)
        assert world.runner.is_computing.wait(30)
        world.rank.membership.leave_before(2)
        while not world.peers[0].is_closed:
            time.sleep(0.001)
        assert world.join(2, stage_index=0, n_stages=1) is MessageKind.JOINED
        device.n_passed = 10**6
        world.plan(2, 1)
        report = world.report()
        assert (report.epoch, report.result.iteration) == (2, 1)


@pytest.mark.parametrize("tokens", [[7, -1, 8, -1], [-1, -1, -1, -1]], ids=["some", "all"])
def test_spans_that_are_not_finite_are_named_and_the_epoch_goes_on(tokens: list[int]) -> None:
    with running_rank() as world:
        assert world.join(1) is MessageKind.JOINED
        world.runner.tokens = tokens
        world.plan(1, 5, n_spans=4)
        result = world.report().result
        assert list(result.token_ids) == [max(0, one) for one in tokens]
        assert list(result.broken_spans) == [i for i, one in enumerate(tokens) if one < 0]
        world.runner.tokens = [7]
        world.plan(1, 6)
        assert world.report().result.iteration == 6
        assert not world.peers[0].is_closed


def test_a_rank_does_not_vouch_for_keys_and_values_after_a_failure_of_its_own() -> None:
    with running_rank() as world:
        record = KVRecord(memoryview(bytearray(RECORD_BYTES)))
        record.begin(8)
        world.journal = KVJournal(record)
        assert world.join(1) is MessageKind.JOINED
        world.plan(1, 1)
        assert world.report().result.iteration == 1
        [stored] = world.journal.answer(worker_pb2.JoinPipelineRequest()).stored_kv
        assert stored.begun_iteration == 1
        world.runner.on_compute = lambda: fail(MemoryError("of the native kernels"))
        world.plan(1, 2)
        assert world.report().failure.is_by_itself
        [stored] = world.journal.answer(worker_pb2.JoinPipelineRequest()).stored_kv
        assert (stored.iteration, stored.begun_iteration) == (1, 0)


HARMLESS: dict[str, Callable[[], object]] = {
    "MemoryError": lambda: fail(MemoryError("of the native kernels")),
    "OutOfMemoryError": lambda: fail(torch.OutOfMemoryError("of a GPU")),
    "RuntimeError": lambda: torch.empty(2**50, dtype=torch.uint8),  # the host has no memory
    "PlanError": lambda: fail(PlanError("row 1 is wrong")),
    "TimeoutError": lambda: fail(TimeoutError("of a grammar")),
}


@pytest.mark.parametrize("error", HARMLESS)
def test_an_iteration_that_breaks_off_costs_the_epoch_and_not_the_weights(error: str) -> None:
    with running_rank() as world:
        assert world.join(1) is MessageKind.JOINED
        world.runner.on_compute = HARMLESS[error]
        world.plan(1, 5)
        failure = world.report().failure
        assert failure.reason.startswith(f"{error}: ")
        assert (failure.iteration, failure.is_by_itself) == (5, True)
        while not world.peers[0].is_closed:
            time.sleep(0.001)
        world.runner.on_compute = lambda: None
        assert world.join(2) is MessageKind.JOINED
        world.plan(2, 1)
        assert world.report().result.iteration == 1


def test_an_error_of_the_device_ends_the_rank_and_names_the_iteration() -> None:
    with running_rank() as world:
        assert world.join(1) is MessageKind.JOINED
        world.runner.on_compute = lambda: fail(RuntimeError("CUDA error: an illegal access"))
        world.plan(1, 5)
        failure = world.report().failure
        assert (failure.iteration, failure.is_by_itself) == (5, True)
    assert world.died_of == "CUDA error: an illegal access"


def fail(error: Exception) -> NoReturn:
    raise error


def tell_to_prepare(world: World, grammar: str, kept: Sequence[bytes] = ()) -> None:
    request = worker_pb2.PrepareGrammarRequest(digest=b"d", grammar=grammar, kept_digests=kept)
    world.rank.prepare_grammar(request.SerializeToString())


def prepared(world: World) -> tuple[bytes, str]:
    """The next frame, which must be about a grammar."""
    kind, payload = world.read()
    assert kind is MessageKind.GRAMMAR_PREPARED
    answer = worker_pb2.PrepareGrammarResponse.FromString(payload)
    return answer.digest, answer.failure


def test_iterations_go_on_while_a_grammar_is_compiled() -> None:
    grammars = LateGrammars()
    with running_rank(grammars=grammars) as world:
        world.join(1)
        tell_to_prepare(world, "it", [b"k"])
        world.plan(1, 1)
        assert list(world.report().result.token_ids) == [7]
        grammars.may_compile.set()
        assert prepared(world) == (b"d", "nothing follows it")
        assert grammars.kept == {b"k"}


def test_a_rank_that_follows_no_grammars_says_so() -> None:
    with running_rank() as world:
        tell_to_prepare(world, "it")
        assert prepared(world) == (b"d", "the model can follow no grammar")
