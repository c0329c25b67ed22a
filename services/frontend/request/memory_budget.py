"""The memory that data of clients may take together in this process.

Code that holds bytes for a client takes a share while it does: for a body that is being received, a
running request, a text that is made into tokens, or output that is not read. A share grows with the
data and ends with it, not with the client's connection.
"""

from types import TracebackType
from typing import Self

from services.common import errors
from services.frontend.request.refusals import Refusal, Refusals


class MemoryBudget:
    """A number of bytes, and the shares that are taken of it. A share that is the only one may
    exceed the budget."""

    def __init__(self, max_bytes: int, *, refusals: Refusals | None = None) -> None:
        self.max_bytes = max_bytes
        self.n_bytes = 0
        """Bytes that all shares take together."""
        self._refusals = Refusals() if refusals is None else refusals

    def share(self, n_bytes: int = 0) -> "Share":
        """Returns a share of `n_bytes` bytes.

        Raises:
            PoolFull: the budget has less left.
        """
        share = Share(self)
        share.grow(n_bytes)
        return share

    def has_room(self, n_bytes: int) -> bool:
        """Returns whether `n_bytes` more bytes are left."""
        return self.n_bytes + n_bytes <= self.max_bytes

    def refuse(self) -> errors.PoolFull:
        """Counts a refusal and returns its error."""
        self._refusals[Refusal.MEMORY] += 1
        return errors.PoolFull("requests take all the memory that they may; try again")


class Share:
    """A part of a budget, until it is closed. Closing it a second time has no effect."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self.n_bytes = 0
        """Bytes that this share takes."""

    def grow(self, n_bytes: int, *, leaving: int = 0) -> None:
        """Takes `n_bytes` more bytes, if `leaving` bytes are left to others then.

        Raises:
            PoolFull: the budget has less left; the share stays as it is.
        """
        budget = self._budget
        if budget.n_bytes > self.n_bytes and not budget.has_room(n_bytes + leaving):
            raise budget.refuse()
        budget.n_bytes += n_bytes
        self.n_bytes += n_bytes

    def shrink(self, n_bytes: int) -> None:
        """Gives `n_bytes` of the share back."""
        self._budget.n_bytes -= n_bytes
        self.n_bytes -= n_bytes

    @property
    def max_bytes(self) -> int:
        """Size of the whole budget in bytes."""
        return self._budget.max_bytes

    def split(self, n_bytes: int) -> "Share":
        """Moves `n_bytes` bytes of this share to a new one, which is closed on its own."""
        part = Share(self._budget)
        part.n_bytes = n_bytes
        self.n_bytes -= n_bytes
        return part

    def close(self) -> None:
        """Gives all bytes back."""
        self.shrink(self.n_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
