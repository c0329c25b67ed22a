"""The memory that clients' data may take together in this process.

Whatever holds bytes for a client takes a share while it does: a body that is being received, a
request in the making, a text while it is made into tokens, output that is not read. A share grows
as its data does and ends with it, not with the client's connection.
"""

from types import TracebackType
from typing import Self

from services.common import errors
from services.frontend.request.refusals import Refusal, Refusals

RETRY_AFTER_S = 1.0
"""Seconds after which a client that was refused may try again."""


class MemoryBudget:
    """A number of bytes, and the shares that are taken of it. One share may take more than there is
    when it is the only one."""

    def __init__(self, max_bytes: int, *, refusals: Refusals | None = None) -> None:
        self.max_bytes = max_bytes
        self.n_bytes = 0
        """Bytes that are taken."""
        self._refusals = Refusals() if refusals is None else refusals

    def share(self, n_bytes: int = 0) -> "Share":
        """Returns a share of that size.

        Raises:
            PoolFull: so much is not left.
        """
        share = Share(self)
        share.grow(n_bytes)
        return share

    def has_room(self, n_bytes: int) -> bool:
        """Returns whether so many bytes more could be taken."""
        return self.n_bytes + n_bytes <= self.max_bytes

    def refuse(self) -> errors.PoolFull:
        """Counts a refusal and returns its error."""
        self._refusals[Refusal.MEMORY] += 1
        return errors.PoolFull(
            "requests take all the memory that they may; try again", retry_after_s=RETRY_AFTER_S
        )


class Share:
    """A part of a budget, until it is closed; closing it twice does no harm."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self.n_bytes = 0
        """Bytes that this share has."""

    def grow(self, n_bytes: int, *, leaving: int = 0) -> None:
        """Takes so many bytes more, if at least `leaving` bytes are left to others.

        Raises:
            PoolFull: they are not left; the share stays as it is.
        """
        budget = self._budget
        if budget.n_bytes > self.n_bytes and not budget.has_room(n_bytes + leaving):
            raise budget.refuse()
        budget.n_bytes += n_bytes
        self.n_bytes += n_bytes

    def shrink(self, n_bytes: int) -> None:
        """Gives so many bytes back, of those that it has."""
        self._budget.n_bytes -= n_bytes
        self.n_bytes -= n_bytes

    @property
    def max_bytes(self) -> int:
        """Bytes of the whole budget."""
        return self._budget.max_bytes

    def split(self, n_bytes: int) -> "Share":
        """Returns a new share with so many of these bytes, which ends on its own."""
        part = Share(self._budget)
        part.n_bytes = n_bytes
        self.n_bytes -= n_bytes
        return part

    def close(self) -> None:
        """Gives all back."""
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
