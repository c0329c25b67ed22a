"""A rank's membership of an epoch: how it begins, who ends it, and what is left of it."""

import gc
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from orcinus.v1 import worker_pb2

from services.worker.models.tensor_parallel import SINGLE, TensorParallel
from services.worker.rank.data_plane.transport import Receipt, TransferError, Transport
from services.worker.rank.epoch_member import EpochMember
from services.worker.rank.membership import Membership
from tests.worker.rank.test_epoch_member import Runner


@dataclass
class Peers:
    """Neighbours who note what becomes of the epoch."""

    tensor_parallel: TensorParallel = SINGLE
    is_aborted: bool = False
    is_closed: bool = False

    def warm_up(self) -> None:
        pass

    def start_receive(self, hidden: torch.Tensor, iteration: int) -> Receipt:
        raise NotImplementedError

    def send(self, hidden: torch.Tensor, iteration: int) -> None:
        raise NotImplementedError

    def abort(self) -> None:
        self.is_aborted = True

    def close(self) -> None:
        self.is_closed = True


@dataclass
class World:
    """A membership whose connections a test can hold up."""

    peers: list[Peers] = field(default_factory=list)
    on_connect: Callable[[], None] = lambda: None
    on_enter: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.membership = Membership(connect=self.connect, enter=self.enter)

    def connect(self, request: worker_pb2.JoinPipelineRequest) -> Transport:
        self.on_connect()
        self.peers.append(Peers())
        return self.peers[-1]

    def enter(self, request: worker_pb2.JoinPipelineRequest, peers: Transport) -> EpochMember:
        self.on_enter()
        return EpochMember(request, Runner(), peers)

    def join(self, epoch: int) -> None:
        self.membership.join(worker_pb2.JoinPipelineRequest(pipeline_id="p", epoch=epoch))


def plan(epoch: int, pipeline_id: str = "p") -> worker_pb2.RunIterationsRequest:
    return worker_pb2.RunIterationsRequest(pipeline_id=pipeline_id, epoch=epoch, iteration=1)


def test_a_rank_is_in_the_epoch_that_it_joined_last() -> None:
    it = World()
    assert it.membership.current is None
    assert it.membership.member_for(plan(0)) is None
    for epoch in (1, 2):
        it.join(epoch)
        member = it.membership.current
        assert member is not None
        assert it.membership.member_for(plan(epoch)) is member
        assert it.membership.member_for(plan(epoch + 1)) is None
        assert it.membership.member_for(plan(epoch, "other")) is None
    assert [peers.is_closed for peers in it.peers] == [True, False]


def test_a_rank_is_busy_while_iterations_are_under_way() -> None:
    it = World()
    assert not it.membership.is_busy
    it.join(1)
    assert not it.membership.is_busy
    member = it.membership.current
    assert member is not None
    member.announce(plan(1))
    assert it.membership.is_busy
    it.membership.leave()
    assert not it.membership.is_busy


def test_an_epoch_that_is_called_off_is_found_by_the_check_and_left_once() -> None:
    it = World()
    it.join(1)
    it.membership.check()
    it.membership.leave_before(1)  # of those before it
    it.membership.check()
    it.membership.leave_before(2)
    assert it.peers[0].is_aborted
    with pytest.raises(TransferError, match="called off"):
        it.membership.check()
    assert it.membership.leave(), "it was called off"
    assert it.peers[0].is_closed
    it.membership.check()
    assert not it.membership.leave(), "there is nothing to leave"


def test_leaving_on_one_s_own_is_not_being_called_off() -> None:
    it = World()
    it.join(1)
    assert not it.membership.leave()
    assert it.membership.current is None


@pytest.mark.parametrize("before", [3, None], ids=["a later one", "none"])
def test_an_epoch_that_is_over_is_not_tried(before: int | None) -> None:
    it = World()
    it.membership.leave_before(before)
    with pytest.raises(TransferError, match="epoch 2 is over"):
        it.join(2)
    assert not it.peers
    if before is not None:
        it.join(before)
        assert it.membership.current is not None


def test_a_rank_that_connects_is_stopped_from_another_thread() -> None:
    it, is_connecting, may_connect = World(), threading.Event(), threading.Event()

    def hang() -> None:
        is_connecting.set()
        assert may_connect.wait(30)

    def call_off() -> None:
        assert is_connecting.wait(30)
        it.membership.leave_before(2)

    it.on_connect = hang
    other = threading.Thread(target=call_off)
    other.start()
    with pytest.raises(TransferError, match="epoch 1 is over"):
        it.join(1)
    other.join(30)
    assert it.membership.current is None
    may_connect.set()
    while not (it.peers and it.peers[0].is_closed):
        time.sleep(0.001)


def test_an_epoch_that_ends_while_it_is_entered_leaves_nothing() -> None:
    it = World()
    it.on_enter = lambda: it.membership.leave_before(2)
    with pytest.raises(TransferError, match="called off"):
        it.join(1)
    assert it.membership.current is None
    assert it.peers[0].is_closed


def test_nothing_of_an_epoch_is_left_when_the_next_one_is_entered() -> None:
    it = World()
    it.join(1)
    old = weakref.ref(it.membership.current)
    left: list[object] = []
    it.on_enter = lambda: left.append(old())
    gc.disable()  # K/V must not wait for the collector
    try:
        it.join(2)
    finally:
        gc.enable()
    assert left == [None]
