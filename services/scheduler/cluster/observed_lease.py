"""The lease as one process sees it: its last record, and the time for which it has not changed.

A process may take the lease when its holder has given it away, when the holder is dead, or when the
record has not changed for the lease's duration. The duration is measured on this process's
monotonic clock, and only time between two successful reads counts.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace

from services.scheduler.cluster.lease import LeaseRecord, LeaseStore, LeaseUnavailable

log = logging.getLogger(__name__)

RENEWAL = 1.25
"""A living leader writes a deleted lease again within this multiple of the retry period."""


class ObservedLease:
    """Reads and writes the lease within a timeout, and computes when this process may take it."""

    def __init__(
        self,
        store: LeaseStore,
        *,
        identity: str,
        predecessors: str,
        lease_duration_s: float,
        retry_period_s: float,
        clock: Callable[[], float],
        leads: Callable[[], bool],
    ) -> None:
        """`identity` is the name of this process. Processes whose names begin with `predecessors`
        have ended; an empty text means that no such processes are known. `leads` returns whether
        this process leads."""
        self._store = store
        self._identity = identity
        self._predecessors = predecessors
        self._duration_s = lease_duration_s
        self._retry_period_s = retry_period_s
        self._clock = clock
        self._leads = leads
        self.call_timeout_s = lease_duration_s / 2  # one hung call leaves time for another
        """Timeout in seconds of one call of the store."""
        self.record: LeaseRecord | None = None
        """The record that was last read or written; None before the first answer of the store."""
        self.leader_renews = False
        """Whether this process has seen the present holder renew the lease."""
        self._silent_s = 0.0  # seconds for which this process has seen the record unchanged
        self._contact_at = -math.inf  # when the store last answered
        self._free_since: float | None = None  # when this process saw that it may take the lease
        self._dead_holder = ""

    @property
    def holder(self) -> str:
        """Identity of the process that held the lease when this process last read or wrote it;
        empty if no process held it."""
        return self.record.holder if self.record else ""

    @property
    def may_soon_be_taken(self) -> bool:
        """Whether this process could take the lease when its holder loses it. For this, the time
        since the last answer of the store must be shorter than the lease's duration. In addition,
        the lease must not have been free for longer than the timeout of a call, because this
        process should have taken it by then."""
        now = self._clock()
        has_waited = self._free_since is not None and now - self._free_since > self.call_timeout_s
        return now - self._contact_at < self._duration_s and not has_waited

    def note_death(self, holder: str) -> None:
        """Records that the process with the identity `holder` has ended. From now on, this process
        may take a lease that names the ended process as its holder."""
        self._dead_holder = holder

    async def read(self) -> LeaseRecord:
        """Reads the lease.

        Raises:
            LeaseUnavailable: the store does not answer within the timeout, or refuses the call.
        """
        return self._observe(await self._limited(self._store.read()))

    async def write(self, record: LeaseRecord) -> None:
        """Writes `record` as the lease, with this process's lease duration rounded up to seconds.

        Raises:
            LeaseConflict: another process has written the lease since `record` was read.
            LeaseUnavailable: the store does not answer within the timeout, or refuses the call.
        """
        written = replace(record, duration_s=math.ceil(self._duration_s))
        self._observe(await self._limited(self._store.write(written)))

    def expires_in_s(self) -> float:
        """Returns the seconds from the last read of the lease until this process may take it. The
        result is 0 or negative if the lease has expired, and 0 if it was given away, its holder is
        dead, or it was never read. It is also 0 if the lease names this process as its holder: then
        a claim of this process succeeded although its call failed."""
        record = self.record
        if record is None or self._is_free(record):
            return 0.0
        if not record.holder:
            return RENEWAL * self._retry_period_s - self._silent_s
        # The duration in the record counts: the holder may have other settings than this process.
        return (record.duration_s or self._duration_s) - self._silent_s

    async def _limited(self, call: Awaitable[LeaseRecord]) -> LeaseRecord:
        try:
            async with asyncio.timeout(self.call_timeout_s):
                return await call
        except TimeoutError:
            raise LeaseUnavailable(f"no answer within {self.call_timeout_s:g} s") from None

    def _observe(self, record: LeaseRecord) -> LeaseRecord:
        now = self._clock()
        if record == self.record:
            # After an outage of the store the holder must have time to renew the lease.
            self._silent_s += min(now - self._contact_at, 2 * self._retry_period_s)
        else:
            self._silent_s = 0.0
        self._contact_at = now
        if self.record is not None and record.holder == self.record.holder:
            self.leader_renews |= record != self.record
        else:
            self.leader_renews = False
            log.info("%s holds the lease", record.holder or "nobody")
        self.record = record
        if self.expires_in_s() > 0 or self._leads():
            self._free_since = None
        elif self._free_since is None:
            self._free_since = now
        return record

    def _is_free(self, record: LeaseRecord) -> bool:
        holder = record.holder
        if not holder:
            return record.is_released
        is_predecessor = bool(self._predecessors) and holder.startswith(self._predecessors)
        return holder in (self._identity, self._dead_holder) or is_predecessor
