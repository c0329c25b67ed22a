"""Makes the connections of one epoch in a separate thread. Any other thread can cancel the epoch.

A call of torch that waits for a lost or stopped rank cannot be interrupted, and may take minutes: a
client of the rendezvous store waits for an answer as long as the connection is open. So the rank
waits for the thread with a timeout, not for the call. If the wait ends first, the thread goes on
until its call returns, then closes the connections that it has made.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future

from services.worker.rank.data_plane.transport import TransferError, Transport


class EpochEntry:
    """The transport of one epoch, from the first attempt to connect until the epoch is over."""

    def __init__(self, epoch: int, connect: Callable[[], Transport]) -> None:
        self.epoch = epoch
        self._connect = connect
        self._opened: Future[Transport] = Future()
        self._lock = threading.Lock()
        self._transport: Transport | None = None
        self._is_over = False
        threading.Thread(target=self._open, name=f"epoch {epoch}", daemon=True).start()

    @property
    def is_over(self) -> bool:
        """Whether the epoch has been cancelled."""
        return self._is_over

    def wait(self, timeout_s: float) -> Transport:
        """Waits until all neighbours have answered, and returns the transport.

        Raises:
            TransferError: a neighbour did not answer in time, or the epoch has been cancelled.
        """
        try:
            transport = self._opened.result(timeout_s)
        except TimeoutError:
            reason = f"the ranks of epoch {self.epoch} have not met in {timeout_s:g} s"
            self.call_off(reason)
            # The ranks may have met in the meantime. The transport is not needed any more.
            if self._opened.exception() is None:
                self._opened.result().close()
            raise TransferError(reason) from None
        return transport

    def call_off(self, reason: str) -> None:
        """Cancels the epoch on this rank. Every wait of the rank for other ranks of the epoch then
        ends.

        May be called from any thread.
        """
        self._is_over = True
        self._settle(TransferError(reason))
        with self._lock:
            transport = self._transport
        if transport is not None:
            transport.abort()

    def _open(self) -> None:
        transport = None
        try:
            transport = self._connect()
            with self._lock:
                self._transport = transport
            if not self._is_over:
                transport.warm_up()
        except TransferError as error:
            self._settle(error)
        else:
            self._settle(transport)
        finally:
            # Has an effect only after an unexpected exception, which the thread prints.
            self._settle(RuntimeError(f"could not connect to the ranks of epoch {self.epoch}"))
            if transport is not None and self._opened.exception() is not None:
                transport.close()

    def _settle(self, outcome: Transport | Exception) -> None:
        with self._lock:
            if self._opened.done():
                return
            if isinstance(outcome, Exception):
                self._opened.set_exception(outcome)
            else:
                self._opened.set_result(outcome)
