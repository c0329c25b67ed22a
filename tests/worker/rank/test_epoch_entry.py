"""Joining an epoch in a thread that may be left behind."""

import threading

import pytest
import torch

from services.worker.models.tensor_parallel import SINGLE, TensorParallel
from services.worker.rank.data_plane.transport import Receipt, TransferError
from services.worker.rank.epoch_entry import EpochEntry


class Peers:
    """Neighbours whose first exchange may take until it is aborted."""

    tensor_parallel: TensorParallel = SINGLE

    def __init__(self, *, answer: bool) -> None:
        self.answer = answer
        self.is_aborted = threading.Event()
        self.is_closed = threading.Event()

    def warm_up(self) -> None:
        if not self.answer:
            assert self.is_aborted.wait(30)
            raise TransferError("aborted")

    def start_receive(self, hidden: torch.Tensor, iteration: int) -> Receipt:
        raise NotImplementedError

    def send(self, hidden: torch.Tensor, iteration: int) -> None:
        raise NotImplementedError

    def abort(self) -> None:
        self.is_aborted.set()

    def close(self) -> None:
        self.is_closed.set()


def test_an_epoch_that_is_joined_can_be_called_off() -> None:
    peers = Peers(answer=True)
    entry = EpochEntry(1, lambda: peers)
    assert entry.wait(30) is peers
    assert not entry.is_over
    entry.call_off("it is over")
    assert entry.is_over
    assert peers.is_aborted.is_set()
    assert not peers.is_closed.is_set(), "that is for those who use it"


def test_neighbours_that_do_not_answer_are_given_up() -> None:
    peers = Peers(answer=False)
    with pytest.raises(TransferError, match="the ranks of epoch 1 have not met"):
        EpochEntry(1, lambda: peers).wait(0.05)
    assert peers.is_closed.wait(30)


class MetAtTheLastMoment(EpochEntry):
    """Neighbours who answer between the end of the wait and the calling off."""

    peers: Peers

    def call_off(self, reason: str) -> None:
        self.peers.is_aborted.set()  # has `warm_up` return
        self._opened.result(30)
        super().call_off(reason)


class Slow(Peers):
    """Neighbours who answer when told to."""

    def warm_up(self) -> None:
        assert self.is_aborted.wait(30)


def test_an_epoch_that_is_given_up_is_not_joined_after_all() -> None:
    MetAtTheLastMoment.peers = peers = Slow(answer=True)
    with pytest.raises(TransferError, match="have not met"):
        MetAtTheLastMoment(1, lambda: peers).wait(0.05)
    assert peers.is_closed.is_set()


def test_what_is_built_too_late_is_closed() -> None:
    peers = Peers(answer=True)
    may_connect = threading.Event()

    def connect() -> Peers:
        assert may_connect.wait(30)
        return peers

    entry = EpochEntry(1, connect)
    entry.call_off("it is over")
    with pytest.raises(TransferError, match="it is over"):
        entry.wait(30)
    may_connect.set()
    assert peers.is_closed.wait(30)


def test_why_it_could_not_be_joined_is_said() -> None:
    def connect() -> Peers:
        raise TransferError("no process group")

    with pytest.raises(TransferError, match="no process group"):
        EpochEntry(1, connect).wait(30)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_is_not_taken_for_a_lost_neighbour() -> None:
    def connect() -> Peers:
        raise KeyError("bug")

    with pytest.raises(RuntimeError, match="could not connect"):
        EpochEntry(1, connect).wait(30)
    for thread in threading.enumerate():
        if thread.name == "epoch 1":
            thread.join(30)  # it says what it is
