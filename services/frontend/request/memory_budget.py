"""The memory budget of this process for the data of all clients.

Code that holds data for a client takes a share of the budget for as long as it holds the data. Such
data are a body that is being received, a running request, a text that is being tokenized, and
output that is not read. The share grows with the data, and ends when the data is freed, which may
be after the client has disconnected. Threads that write answers change shares, too.
"""

from threading import Lock
from types import TracebackType
from typing import Self

from services.common import errors
from services.frontend.request.refusals import Refusal, Refusals


class MemoryBudget:
    """Limits the bytes of all shares together. One share may exceed the limit while all other
    shares are empty."""

    def __init__(self, max_bytes: int, *, refusals: Refusals | None = None) -> None:
        self.max_bytes = max_bytes
        self.lock = Lock()
        """Lock that is held while the bytes of the budget and of its shares change."""
        self.n_bytes = 0
        """Bytes that all shares take together."""
        self._refusals = Refusals() if refusals is None else refusals

    def share(self, n_bytes: int = 0) -> "Share":
        """Takes `n_bytes` bytes of the budget, and returns the share that holds them.

        Raises:
            PoolFull: the budget has fewer bytes left.
        """
        share = Share(self)
        share.grow(n_bytes)
        return share

    def has_room(self, n_bytes: int) -> bool:
        """Returns whether the budget has `n_bytes` bytes left."""
        return self.n_bytes + n_bytes <= self.max_bytes

    def refuse(self) -> errors.PoolFull:
        """Counts a refusal for lack of memory, and returns the error for it."""
        self._refusals[Refusal.MEMORY] += 1
        return errors.PoolFull("requests take all the memory that they may; try again")


class Share:
    """A part of a budget. A closed share is empty, and may grow again. But if the share is used as
    a `with` block, it ends for good with the block, and later calls of its methods, for example in
    other threads, have no effect."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._has_ended = False
        self.n_bytes = 0
        """Bytes that this share takes."""

    def grow(self, n_bytes: int, *, leaving: int = 0) -> None:
        """Takes `n_bytes` more bytes, if the budget then still has `leaving` bytes for other
        shares. Has no effect after the end of the `with` block of this share.

        Raises:
            PoolFull: the budget has fewer bytes left. The size of the share is not changed.
        """
        budget = self._budget
        with budget.lock:
            if self._has_ended:
                return
            if budget.n_bytes > self.n_bytes and not budget.has_room(n_bytes + leaving):
                raise budget.refuse()
            budget.n_bytes += n_bytes
            self.n_bytes += n_bytes

    def shrink(self, n_bytes: int) -> None:
        """Gives `n_bytes` bytes of the share back to the budget."""
        with self._budget.lock:
            if not self._has_ended:
                self._give_back(n_bytes)

    @property
    def max_bytes(self) -> int:
        """Size of the whole budget in bytes."""
        return self._budget.max_bytes

    def split(self, n_bytes: int) -> "Share":
        """Moves `n_bytes` bytes of this share to a new share, which must be closed separately."""
        part = Share(self._budget)
        with self._budget.lock:
            part.n_bytes = n_bytes
            self.n_bytes -= n_bytes
        return part

    def close(self) -> None:
        """Gives all bytes of the share back to the budget."""
        with self._budget.lock:
            self._give_back(self.n_bytes)

    def _give_back(self, n_bytes: int) -> None:
        self._budget.n_bytes -= n_bytes
        self.n_bytes -= n_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._budget.lock:
            self._give_back(self.n_bytes)
            self._has_ended = True
