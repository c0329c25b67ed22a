"""A rank's thread that never computes: it says that the rank lives, and hears what cannot wait.

Signs of life come however busy the main thread is, since what takes long there, in torch, does not
hold the interpreter lock. They stop when the process is stopped or does not get to run at all.
"""

import threading
from collections.abc import Callable

from services.worker.channel import ChannelClosed, MessageKind, RankEnd

HEARTBEAT_S = 0.5


class Lifeline:
    """Serves the second channel to the controller, until that is gone."""

    def __init__(self, channel: RankEnd) -> None:
        self._channel = channel

    def start(self, on_leave: Callable[[int | None], None]) -> None:
        """Begins. `on_leave` is called in this thread: all epochs before the given one are over;
        None when the controller is gone, and with it every epoch."""
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
