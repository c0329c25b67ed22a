"""The lease that candidates for leadership compete for, and the interface of its store.

A lease names its holder and counts how often it was acquired. A write names the version that was
read and fails if the lease has a newer version, so that of two candidates one wins and the other
gets an error. This module does not depend on Kubernetes. The times in a record are only for people
to read; no decision depends on them.
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
    """Number of times that the lease has been acquired; a Kubernetes API keeps 32 bits of the
    number."""

    duration_s: int
    """Seconds without a change after which other candidates may take the lease."""

    version: str
    """The store's name for this state; empty if there is no lease, so that a write creates one."""

    acquire_time: datetime | None = None
    """Time at which the holder acquired the lease, by the holder's wall clock."""

    renew_time: datetime | None = None
    """Time at which the holder last renewed the lease, by the holder's wall clock."""

    address: str = ""
    """Address of the leader, host:port. Other processes connect to the address to see whether the
    leader still runs. Empty if the leader has given none."""

    model: str = ""
    """Description of the model that was served last, which the leader keeps here for the next
    leader. Empty if there is none."""

    is_released: bool = False
    """Whether the last holder has given the lease away. A lease that has no holder and was not
    released was created, deleted or emptied by an operator; the leader, if one lives, writes the
    lease again."""


class LeaseConflict(Exception):
    """Raised when another process has written the lease since this process read it."""


class LeaseUnavailable(Exception):
    """Raised when the store did not answer or refused a call; another attempt may succeed."""


class LeaseStore(Protocol):
    """A store of one lease."""

    async def read(self) -> LeaseRecord:
        """Returns the lease as it is now. If there is no lease, returns a record without holder and
        version.

        Raises:
            LeaseUnavailable: the lease could not be read.
        """
        ...

    async def write(self, record: LeaseRecord) -> LeaseRecord:
        """Replaces the lease, if it still has the version that the record has. Creates the lease if
        the record has no version. Returns the new state of the lease.

        Raises:
            LeaseConflict: the lease has another version, or was deleted or created meanwhile.
            LeaseUnavailable: the call failed. The lease may have been written or not.
        """
        ...
