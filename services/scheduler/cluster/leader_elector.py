"""The election: decides on a lease which of several schedulers leads.

A candidate takes the lease when its record has not changed for the lease's duration, as seen by
this process on a monotonic clock; the times in the record come from other machines and decide
nothing. The leader gives up when it has not renewed for a shorter time, counted from before the
call that renewed. As every renewal is seen after it was sent, the old leader has stopped before a
new one starts, for as long as their clocks run at speeds that differ by less than the two times do.

That is no fence: a process may be held up between looking at `is_leader` and acting. So every
acquisition has a term higher than all before it, and those who take orders refuse an older one.
"""

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from services.scheduler.cluster.lease import (
    LeaseConflict,
    LeaseRecord,
    LeaseStore,
    LeaseUnavailable,
)

log = logging.getLogger(__name__)

JITTER = 1.2
"""Ratio of the longest pause between attempts to the shortest. It shortens the retry period and
never stretches it, so that a lease that expires is taken within that period."""


class LeadershipLost(Exception):
    """Raised when this process does not lead any more."""


def wall_clock() -> datetime:
    """Returns the time of day, for people who read the lease."""
    return datetime.now(UTC)


class LeaderElector:
    """One candidate of the election. Calls of its methods may overlap; the lease is written by one
    call at a time."""

    def __init__(
        self,
        store: LeaseStore,
        *,
        identity: str,
        lease_duration_s: float = 15.0,
        renew_deadline_s: float = 10.0,
        retry_period_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
        now: Callable[[], datetime] = wall_clock,
    ) -> None:
        if not 0 < retry_period_s < renew_deadline_s < lease_duration_s:
            raise ValueError(
                "retry_period_s must be less than renew_deadline_s, and that less than "
                f"lease_duration_s: {retry_period_s:g}, {renew_deadline_s:g}, {lease_duration_s:g}"
            )
        if not identity:
            raise ValueError("identity must not be empty: an empty holder means that nobody leads")
        self._store = store
        self._identity = identity
        self._lease_duration_s = lease_duration_s
        self._renew_deadline_s = renew_deadline_s
        self._retry_period_s = retry_period_s
        self._call_timeout_s = renew_deadline_s / 2  # one hung call leaves time for another
        self._clock = clock
        self._jitter = jitter
        self._now = now
        self._writing = asyncio.Lock()
        self._record: LeaseRecord | None = None
        self._changed_at = -math.inf  # when this process saw the record change
        self._contact_at = -math.inf  # when the store last answered
        self._term: int | None = None
        self._renewed_at = -math.inf  # before the call that renewed
        self._has_claimed = False  # a claim may reach the store after its caller gave it up
        self._trouble = ""

    @property
    def identity(self) -> str:
        """Name of this process in the lease; no other process may ever have it."""
        return self._identity

    @property
    def leader(self) -> str:
        """Identity of the holder last seen; empty if there is none or the lease was never read."""
        return self._record.holder if self._record else ""

    @property
    def is_leader(self) -> bool:
        """Whether this process leads at this moment. It is judged anew at each look, and so false
        at once in a process that was stopped for longer than it may go without renewing."""
        return self._term is not None and self._time_left_s() > 0

    @property
    def synced(self) -> bool:
        """Whether the store has answered within the lease's duration, so that this candidate could
        take over."""
        return self._clock() - self._contact_at < self._lease_duration_s

    async def acquire(self) -> int:
        """Waits until this process leads; returns its term. No other call, here or elsewhere, has
        returned the same term, unless somebody deletes the lease; the first on a new lease is 1."""
        while True:
            self._term = None
            started_at = self._clock()
            try:
                await self._try_to_acquire()
            except LeaseConflict:
                log.debug("another candidate wrote the lease first")
            except LeaseUnavailable as trouble:
                self._report(str(trouble))
            else:
                self._report("")
            if self._term is not None and self.is_leader:
                log.info("%s leads, term %d", self._identity, self._term)
                return self._term
            expires_in_s = self._expires_in_s()
            await self._pause(started_at, expires_in_s if expires_in_s > 0 else math.inf)

    async def hold(self) -> None:
        """Keeps the lease renewed, and ends only by an error or when cancelled.

        Raises:
            LeadershipLost: another process holds the lease, or it could not be renewed in time.
        """
        while True:
            await self._pause(self._renewed_at, self._time_left_s())
            await self._renew()

    async def advance(self, beyond: int) -> int:
        """Moves this leader's term past a number that the stages have seen, since the count starts
        anew after somebody has deleted the lease. Returns the new term.

        Raises:
            LeadershipLost: as `hold`.
        """
        return await self._renew(beyond + 1)

    async def release(self) -> None:
        """Ends leadership and empties the lease, so that another candidate need not wait for it
        to expire. Takes one call's timeout at most, and raises nothing if the store does not
        answer."""
        self._term = None
        if not self._has_claimed:
            return
        try:
            async with asyncio.timeout(self._call_timeout_s), self._writing:
                await self._empty()
        except (TimeoutError, LeaseConflict, LeaseUnavailable) as trouble:
            log.warning(
                "the lease was not released and has to expire: %s", str(trouble) or "no answer"
            )

    async def _try_to_acquire(self) -> None:
        record = await self._read()
        if self._expires_in_s() > 0:
            return
        async with self._writing:
            self._has_claimed = True
            now = self._timestamp()
            claim = replace(
                record,
                holder=self._identity,
                transitions=record.transitions + 1,
                acquire_time=now,
                renew_time=now,
            )
            await self._write(claim)
            self._term = claim.transitions

    async def _renew(self, at_least: int = 0) -> int:
        """Writes the lease as its holder until that succeeds, and never with a lower count than
        before; returns the count.

        Raises:
            LeadershipLost: it did not succeed in time.
        """
        async with self._writing:
            is_current = True
            while True:
                started_at = self._clock()
                self._check_deadline()
                try:
                    if not is_current:
                        await self._check_holder()
                    transitions = await self._write_as_holder(at_least)
                except LeaseConflict:
                    # Another process has it, or a write of ours has arrived that seemed lost.
                    if is_current:
                        is_current = False
                        continue
                except LeaseUnavailable as trouble:
                    self._report(str(trouble))
                else:
                    self._report("")
                    self._check_deadline()  # the call itself may have been held up
                    self._term = transitions
                    return transitions
                await self._pause(started_at, self._time_left_s())

    async def _write_as_holder(self, at_least: int) -> int:
        assert self._record is not None  # read when it was acquired
        transitions = max(at_least, self._term or 0, self._record.transitions)
        renewal = replace(self._record, transitions=transitions, renew_time=self._timestamp())
        await self._write(renewal, self._time_left_s())
        return transitions

    async def _check_holder(self) -> None:
        record = await self._read(self._time_left_s())
        if record.holder != self._identity:
            self._lose(f"{record.holder or 'nobody'} holds the lease")

    def _check_deadline(self) -> None:
        if self._term is None:
            self._lose("it was given up")
        if self._time_left_s() <= 0:
            trouble = self._trouble or "this process was held up"
            self._lose(f"the lease was not renewed for {self._renew_deadline_s:g} s: {trouble}")

    def _lose(self, why: str) -> None:
        self._term = None
        raise LeadershipLost(f"{self._identity} does not lead any more: {why}")

    async def _empty(self) -> None:
        record = await self._read()
        while record.holder == self._identity:
            vacancy = replace(record, holder="", renew_time=self._timestamp())
            try:
                await self._write(vacancy)
            except LeaseConflict:
                record = await self._read()
            else:
                return

    async def _read(self, at_most_s: float = math.inf) -> LeaseRecord:
        return self._observe(await self._limited(self._store.read(), at_most_s))

    async def _write(self, record: LeaseRecord, at_most_s: float = math.inf) -> None:
        started_at = self._clock()
        written = replace(record, duration_s=math.ceil(self._lease_duration_s))
        self._observe(await self._limited(self._store.write(written), at_most_s))
        self._renewed_at = started_at

    async def _limited(self, call: Awaitable[LeaseRecord], at_most_s: float) -> LeaseRecord:
        timeout_s = min(self._call_timeout_s, at_most_s)
        try:
            async with asyncio.timeout(timeout_s):
                return await call
        except TimeoutError:
            raise LeaseUnavailable(f"no answer within {timeout_s:g} s") from None

    def _observe(self, record: LeaseRecord) -> LeaseRecord:
        self._contact_at = self._clock()
        if record != self._record:
            self._changed_at = self._contact_at
        if self._record is None or record.holder != self._record.holder:
            log.info("%s holds the lease", record.holder or "nobody")
        self._record = record
        return record

    def _expires_in_s(self) -> float:
        """Returns the seconds until this process may take the lease; 0 for a lease that is empty
        or, after a claim that seemed lost, its own."""
        if self._record is None or self._record.holder in ("", self._identity):
            return 0.0
        # The holder's duration counts: it may have been started with other settings.
        duration_s = self._record.duration_s or self._lease_duration_s
        return self._changed_at + duration_s - self._clock()

    def _time_left_s(self) -> float:
        """Returns the seconds until this process must have renewed the lease."""
        return self._renewed_at + self._renew_deadline_s - self._clock()

    async def _pause(self, since: float, at_most_s: float) -> None:
        """Waits for the next attempt: until a retry period after `since`, but no longer than
        `at_most_s`."""
        period_s = self._retry_period_s / (1 + (JITTER - 1) * self._jitter())
        pause_s = since + period_s - self._clock()
        await asyncio.sleep(max(0.0, min(pause_s, at_most_s)))

    def _report(self, trouble: str) -> None:
        """Logs trouble when it changes; an empty text means that there is none."""
        if trouble and trouble != self._trouble:
            log.warning("the lease cannot be kept: %s", trouble)
        elif self._trouble and not trouble:
            log.info("the lease can be read and written again")
        self._trouble = trouble

    def _timestamp(self) -> datetime:
        """Returns the present time, but never the time in the record: a write that changes nothing
        is none, and would look like a leader that has stopped."""
        now = self._now()
        if self._record is not None and now == self._record.renew_time:
            now += timedelta(microseconds=1)
        return now
