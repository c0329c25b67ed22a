"""A thread of a rank that sends heartbeats, receives urgent messages and watches the main thread.

Heartbeats are sent even if the main thread is busy, because long calls of torch do not hold the
interpreter lock. Heartbeats cease when the process is stopped or gets no processor time. When a
step of the main thread takes longer than its limit (`rank.activity`), the thread reports this to
the controller, and the process ends.
"""

import threading
import time
from collections.abc import Callable

from services.common.watchdog import end_hung_process
from services.worker.channel import ChannelClosed, MessageKind, RankEnd
from services.worker.rank.activity import Activity, StepTimer

HEARTBEAT_S = 0.25
"""Interval of a rank's heartbeats in seconds."""


class Lifeline:
    """A thread that serves the second channel to the controller, until the channel is closed."""

    def __init__(
        self,
        channel: RankEnd,
        activity: Activity,
        *,
        on_hang: Callable[[str], None] = end_hung_process,
    ) -> None:
        """`on_hang` is called with the reason when the main thread hangs. The default ends the
        process."""
        self._channel = channel
        self._timer = StepTimer(activity)
        self._on_hang = on_hang
        self._on_grammar: Callable[[bytes], None] | None = None
        self._lock = threading.Lock()  # guards the next two attributes
        self._on_leave: Callable[[int | None], None] | None = None
        self._orders: list[int | None] = []

    def start(self) -> None:
        """Starts the thread."""
        threading.Thread(target=self._serve, name="lifeline", daemon=True).start()

    def attach(
        self,
        on_leave: Callable[[int | None], None],
        on_grammar: Callable[[bytes], None] | None = None,
    ) -> None:
        """Sets the functions that are called, in the lifeline's thread, when epochs are over and
        when a grammar is to be compiled.

        The argument of `on_leave` is the first epoch that is not over, or None if all epochs are
        over because the controller is gone. If epochs have ended before this call, `on_leave` is
        called at once, in the calling thread. The argument of `on_grammar` is a
        PrepareGrammarRequest. The controller sends none before the rank has joined an epoch.
        """
        self._on_grammar = on_grammar
        with self._lock:
            self._on_leave = on_leave
            orders, self._orders = self._orders, []
        for order in orders:
            on_leave(order)

    def _serve(self) -> None:
        try:
            counted_at = time.monotonic()
            while True:
                self._channel.send(MessageKind.HEARTBEAT, b"")
                message = self._channel.receive(HEARTBEAT_S)
                while message is not None:
                    kind, payload = message
                    if kind is MessageKind.LEAVE:
                        self._leave(int(payload))
                    elif kind is MessageKind.PREPARE_GRAMMAR and self._on_grammar is not None:
                        self._on_grammar(payload)
                    message = self._channel.receive(0)
                now = time.monotonic()
                # At most one interval counts: in the rest of the time the process did not run.
                if reason := self._timer.add(min(now - counted_at, HEARTBEAT_S)):
                    self._channel.send(MessageKind.FAILURE, reason.encode())
                    self._on_hang(reason)
                    return
                counted_at = now
        except ChannelClosed:
            self._leave(None)

    def _leave(self, epoch: int | None) -> None:
        self._timer.end_epochs_before(epoch)
        with self._lock:
            on_leave = self._on_leave
            if on_leave is None:
                self._orders.append(epoch)
        if on_leave is not None:
            on_leave(epoch)
