"""A rank's second channel, over a real socket pair."""

import queue
import socket

from services.worker.channel import MessageKind, RankEnd
from services.worker.rank.lifeline import Lifeline


def test_it_gives_signs_of_life_and_passes_orders_on_until_the_controller_is_gone() -> None:
    ours, theirs = socket.socketpair()
    controller = RankEnd(ours)
    orders: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    Lifeline(RankEnd(theirs)).start(orders.put)
    for _ in range(2):
        assert controller.receive(5) == (MessageKind.HEARTBEAT, b"")
    controller.send(MessageKind.LEAVE, b"7")
    controller.send(MessageKind.LEAVE, b"8")
    assert [orders.get(timeout=5), orders.get(timeout=5)] == [7, 8]
    assert controller.receive(5) == (MessageKind.HEARTBEAT, b"")
    ours.close()
    assert orders.get(timeout=5) is None
    theirs.close()
