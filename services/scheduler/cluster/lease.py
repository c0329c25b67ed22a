"""The lease that candidates for leadership compete for, and where it is kept.

A lease names its holder and counts its changes of hands. It is written only against the version
that was read, so that of two candidates one wins and the other learns of it. Nothing here knows
Kubernetes, and no decision rests on the times in a record: they are for people to read.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """One state of the lease."""

    holder: str
    """Identity of the leader; empty if no process leads."""

    transitions: int
    """Number of times the lease has been acquired; a Kubernetes API keeps it in 32 bits."""

    duration_s: int
    """Seconds without a change after which other candidates may take the lease."""

    version: str
    """The store's name for this state."""

    acquire_time: datetime | None = None
    """Time at which the holder acquired it, by the holder's wall clock."""

    renew_time: datetime | None = None
    """Time at which the holder last renewed it, by the holder's wall clock."""

    address: str = ""
    """Address of the leader, host:port, at which other processes may look whether it is there;
    empty if it has given none."""


class LeaseConflict(Exception):
    """Raised when the lease was written since the version at hand was read."""


class LeaseUnavailable(Exception):
    """Raised when the store could not be asked, or refused; trying again may help."""


class LeaseStore(Protocol):
    """A store of one lease."""

    async def read(self) -> LeaseRecord:
        """Returns the lease as it is now.

        Raises:
            LeaseUnavailable: it could not be read.
        """
        ...

    async def write(self, record: LeaseRecord) -> LeaseRecord:
        """Replaces the state whose version the record carries; returns the new state.

        Raises:
            LeaseConflict: that version is not the newest.
            LeaseUnavailable: it is not known whether it was written.
        """
        ...
