"""A rank's second channel, over a real socket pair, beside a main thread that may stand."""

import contextlib
import queue
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from services.common.iteration_limit import IterationLimit
from services.worker.channel import MessageKind, RankEnd
from services.worker.rank.activity import Activity
from services.worker.rank.lifeline import Lifeline
from tests.limits import HANG_S


@dataclass
class World:
    """The controller's end, what the main thread does, and what the lifeline calls."""

    controller: RankEnd
    socket: socket.socket
    lifeline: Lifeline
    activity: Activity
    hangs: "queue.SimpleQueue[str]"

    def until_failure(self) -> str:
        """Passes heartbeats over, and returns the reason for which the rank ends."""
        while True:
            frame = self.controller.receive(30)
            assert frame is not None
            if frame[0] is MessageKind.FAILURE:
                return frame[1].decode()
            assert frame == (MessageKind.HEARTBEAT, b"")


@contextlib.contextmanager
def running(floor_s: float) -> Iterator[World]:
    ours, theirs = socket.socketpair()
    activity = Activity(IterationLimit(floor_s=floor_s, ceiling_s=60))
    hangs: queue.SimpleQueue[str] = queue.SimpleQueue()
    lifeline = Lifeline(RankEnd(theirs), activity, on_hang=hangs.put)
    before = set(threading.enumerate())
    lifeline.start()
    (thread,) = set(threading.enumerate()) - before
    with theirs:
        with ours:
            yield World(RankEnd(ours), ours, lifeline, activity, hangs)
        thread.join(30)  # it ends when the controller's end is closed
        assert not thread.is_alive()


def test_it_gives_signs_of_life_and_passes_orders_on_until_the_controller_is_gone() -> None:
    orders: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    with running(floor_s=60) as world:
        assert world.controller.receive(30) == (MessageKind.HEARTBEAT, b"")
        world.controller.send(MessageKind.LEAVE, b"6")
        assert world.controller.receive(30) == (MessageKind.HEARTBEAT, b""), "6 has been heard"
        world.lifeline.attach(orders.put)
        world.controller.send(MessageKind.LEAVE, b"7")
        world.controller.send(MessageKind.LEAVE, b"8")
        assert [orders.get(timeout=HANG_S) for _ in range(3)] == [6, 7, 8]
        assert world.controller.receive(30) == (MessageKind.HEARTBEAT, b"")
        world.socket.close()
        assert orders.get(timeout=HANG_S) is None


def test_a_grammar_does_not_wait_for_the_iteration_that_the_main_thread_computes() -> None:
    grammars: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    with running(floor_s=60) as world:
        world.activity.exchange(3, epoch=7)
        world.lifeline.attach(lambda _: None, grammars.put)
        world.controller.send(MessageKind.PREPARE_GRAMMAR, b"grammar")
        assert grammars.get(timeout=HANG_S) == b"grammar"


def test_a_main_thread_that_hangs_is_told_to_the_controller_and_ends_the_rank() -> None:
    with running(floor_s=0.6) as world:
        world.activity.turn()
        reason = world.until_failure()
        assert reason == "it hangs: it turns for more than 0.6 s"
        assert world.hangs.get(timeout=HANG_S) == reason


def test_a_rank_that_waits_for_others_hangs_only_when_their_epoch_is_over() -> None:
    with running(floor_s=0.6) as world:
        world.activity.exchange(3, epoch=7)
        for _ in range(3):
            assert world.controller.receive(30) == (MessageKind.HEARTBEAT, b"")
        world.controller.send(MessageKind.LEAVE, b"7")  # those before it
        for _ in range(3):
            assert world.controller.receive(30) == (MessageKind.HEARTBEAT, b"")
        world.controller.send(MessageKind.LEAVE, b"8")
        assert world.until_failure() == "it hangs: it exchanges iteration 3 for more than 0.6 s"
