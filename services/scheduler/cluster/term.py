"""A term: the time during which one scheduler leads, and the epochs that belong to it.

A new epoch must be newer than all epochs that the stages have seen. All epochs of a deposed leader
must be older than the epochs of its successor, or the deposed leader could take the stages back. So
each term has its own range of epochs, and a later term has a higher range. A stage refuses an epoch
that is not newer than the newest epoch that it knows: this is the fencing, and it needs no clock. A
leader forms epochs inside the range of its term without asking the election, so also while the API
server does not answer. For an epoch beyond the range, the election must move the leader to a later
term.
"""

from typing import Protocol

from services.common.epochs import EPOCHS_PER_TERM, MAX_REACHED_EPOCH


class Term(Protocol):
    """The term of a leader: gives out the numbers of the leader's new epochs."""

    async def next_epoch(self, seen: int) -> int:
        """Returns an epoch newer than `seen`, the newest that any stage has been in.

        No leader can have reached an epoch above `MAX_REACHED_EPOCH` (`services/common/epochs.py`),
        so a higher `seen` is an error of a stage. For such a value, the returned epoch is only
        newer than all epochs that this term has given out. The stage that reported the value ends
        when it gets the returned epoch, and is started again without the value.

        Raises:
            LeadershipLost: another scheduler leads.
        """


class Elector(Protocol):
    """The method of `LeaderElector` that a term needs."""

    async def advance(self, beyond: int) -> int:
        """Moves the leader to a term later than `beyond`, and returns the new term. Raises
        LeadershipLost if this process is not the leader any more."""


class Unopposed:
    """The term of a scheduler that has no rival."""

    def __init__(self) -> None:
        self._last = 0

    async def next_epoch(self, seen: int) -> int:
        """Returns a number above `seen` and above all numbers that were returned before. After a
        restart of all stages `seen` is 0."""
        self._last = max(seen if seen <= MAX_REACHED_EPOCH else 0, self._last) + 1
        return self._last


class ElectedTerm:
    """The term of an elected leader. Terms are numbered, and every new leader has a higher
    number."""

    def __init__(self, number: int, elector: Elector) -> None:
        self._number = number
        self._elector = elector
        self._last = 0

    async def next_epoch(self, seen: int) -> int:
        """Returns the next number in the range of this term.

        The stages may have seen an epoch of this term that this leader has not given out, or an
        epoch of a later term. Then there is another leader, or the lease was deleted and terms
        began at 1 again. The election decides: only a process that still leads is moved to a later
        term.
        """
        own = max(self._last, self._number * EPOCHS_PER_TERM)
        is_used_up = self._last + 1 == (self._number + 1) * EPOCHS_PER_TERM
        if seen > own or is_used_up:
            newest = max(seen, own) if seen <= MAX_REACHED_EPOCH else own
            self._number = await self._elector.advance(newest // EPOCHS_PER_TERM)
            own = self._number * EPOCHS_PER_TERM
        self._last = own + 1
        return self._last
