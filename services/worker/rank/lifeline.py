"""A rank's thread that never computes: it sends heartbeats, and hears what cannot wait.

Heartbeats go out however busy the main thread is, since torch's long calls do not hold the
interpreter lock. They stop when the process is stopped or gets no share of a processor.
"""

import threading
from collections.abc import Callable

from services.worker.channel import ChannelClosed, MessageKind, RankEnd

HEARTBEAT_S = 0.5
"""Interval of a rank's heartbeats."""


class Lifeline:
    """A thread that serves the second channel to the controller until the controller is gone."""

    def __init__(self, channel: RankEnd) -> None:
        self._channel = channel

    def start(self, on_leave: Callable[[int | None], None]) -> None:
        """Starts the thread, which calls `on_leave` with the first epoch that is not over, or with
        None when the controller is gone and with it every epoch."""
        threading.Thread(target=self._serve, args=[on_leave], name="lifeline", daemon=True).start()

    def _serve(self, on_leave: Callable[[int | None], None]) -> None:
        try:
            while True:
                self._channel.send(MessageKind.HEARTBEAT, b"")
                message = self._channel.receive(HEARTBEAT_S)
                while message is not None:
                    kind, payload = message
                    if kind is MessageKind.LEAVE:
                        on_leave(int(payload))
                    message = self._channel.receive(0)
        except ChannelClosed:
            on_leave(None)
