"""A term: the time during which one scheduler leads, and the epochs that belong to it.

An epoch must be newer than all that the stages have seen, and the epochs of a deposed leader must
be older than those of its successor, or it could take the stages back. So each term has a range
of epochs of its own, the later the term the higher. A stage refuses what is not newer than what
it knows: that is the fence, and no clock is in it. Inside its range a leader forms epochs without
asking anybody, so also while the API server is away; past it, only the election can take it.
"""

from typing import Protocol

from services.common.epochs import EPOCHS_PER_TERM, MAX_REACHED_EPOCH


class Term(Protocol):
    """A term, which hands out epochs."""

    async def next_epoch(self, seen: int) -> int:
        """Returns an epoch newer than `seen`, the newest that any stage has been in.

        If no leader can have reached that one (`epochs.py`), it is only newer than all before it:
        the stage that has seen the other starts again when it is told this one.

        Raises:
            LeadershipLost: it is another's turn.
        """


class Elector(Protocol):
    """The part of the election that a term needs."""

    async def advance(self, beyond: int) -> int:
        """Moves the leader to a term later than `beyond`, if it is still the leader; returns the
        new term."""


class Unopposed:
    """The term of a scheduler that has no rival."""

    def __init__(self) -> None:
        self._last = 0

    async def next_epoch(self, seen: int) -> int:
        """Returns the next number. Stages that have all been restarted have seen none."""
        self._last = max(seen if seen <= MAX_REACHED_EPOCH else 0, self._last) + 1
        return self._last


class ElectedTerm:
    """The term of an elected leader; its number grows with every change of leaders."""

    def __init__(self, number: int, elector: Elector) -> None:
        self._number = number
        self._elector = elector
        self._last = 0

    async def next_epoch(self, seen: int) -> int:
        """Returns the next number in the range of this term.

        If the stages have seen an epoch of this term that this leader has not handed out, or one of
        a later term, there is another leader, or the election began anew while they lived on. The
        election knows: it moves only a leader on.
        """
        own = max(self._last, self._number * EPOCHS_PER_TERM)
        is_used_up = self._last + 1 == (self._number + 1) * EPOCHS_PER_TERM
        if seen > own or is_used_up:
            newest = max(seen, own) if seen <= MAX_REACHED_EPOCH else own
            self._number = await self._elector.advance(newest // EPOCHS_PER_TERM)
            own = self._number * EPOCHS_PER_TERM
        self._last = own + 1
        return self._last
