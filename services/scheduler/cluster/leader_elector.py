"""The election: decides on a lease which of several schedulers leads.

A candidate takes the lease when no process holds it, when its holder is plainly dead, or when its
record has not changed for the lease's duration while this candidate could see it. Only time between
two looks of this process counts, on a monotonic clock: the times in the record come from other
machines and decide nothing, and a time in which the API server was away says nothing of the holder.
The holder is plainly dead when this process runs in the same container, so that the one before it
has ended, or when its watch says so (`leader_watch.py`).

A leader leads until it learns that it does not: another process holds the lease, or the stages know
a later term. Not being able to renew the lease is no reason to stop. It costs a standby that sees
the lease a wait, and nothing while the API server is away for all.

So two processes may believe that they lead, and no clock prevents it. The stages do: every
acquisition has a term higher than all before it, each term has its own range of epochs
(`term.py`), and a stage takes nothing that is not of the newest epoch it has joined. A deposed
leader can form epochs only in its own, older range and without asking; as soon as the stages know
a newer one, it has to ask the lease, and steps down if that names another or cannot be asked. Of
two leaders the one with the later term takes the stages once, and the other never gets them back.
"""

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import NoReturn

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
    """Returns the time of day, for people who look at the lease."""
    return datetime.now(UTC)


class LeaderElector:
    """One candidate of the election. Calls of its methods may overlap; the lease is written by one
    call at a time."""

    def __init__(
        self,
        store: LeaseStore,
        *,
        identity: str,
        address: str = "",
        predecessors: str = "",
        lease_duration_s: float = 8.0,
        retry_period_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
        now: Callable[[], datetime] = wall_clock,
    ) -> None:
        """`address` is where other processes may look whether this one is there. `predecessors` is
        the beginning of the identities of processes that have ended, since this one runs in their
        place."""
        if not 0 < 2 * retry_period_s < lease_duration_s:
            raise ValueError(
                "retry_period_s must be less than half of lease_duration_s: "
                f"{retry_period_s:g}, {lease_duration_s:g}"
            )
        if not identity:
            raise ValueError("identity must not be empty: an empty holder means that none leads")
        self._store = store
        self._identity = identity
        self._address = address
        self._predecessors = predecessors
        self._lease_duration_s = lease_duration_s
        self._retry_period_s = retry_period_s
        self._call_timeout_s = lease_duration_s / 2  # one hung call leaves time for another
        self._clock = clock
        self._jitter = jitter
        self._now = now
        self._writing = asyncio.Lock()
        self._record: LeaseRecord | None = None
        self._silent_s = 0.0  # for which this process has seen the record unchanged
        self._contact_at = -math.inf  # when the store last answered
        self._free_since: float | None = None  # when this process saw that it may take the lease
        self._dead_holder = ""
        self._has_news = asyncio.Event()  # a holder has died
        self._term: int | None = None
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
    def leader_address(self) -> str:
        """Address of the holder last seen; empty if it has given none."""
        return self._record.address if self._record else ""

    @property
    def is_leader(self) -> bool:
        """Whether this process leads, as far as it knows."""
        return self._term is not None

    @property
    def could_take_over(self) -> bool:
        """Whether this candidate could take over: the store has answered within the lease's
        duration, and there is no lease that it might have taken by now and has not."""
        now = self._clock()
        has_waited = self._free_since is not None and now - self._free_since > self._call_timeout_s
        return now - self._contact_at < self._lease_duration_s and not has_waited

    def note_death(self, holder: str) -> None:
        """Notes that the process of this identity has ended; its lease is taken at once."""
        self._dead_holder = holder
        self._has_news.set()

    async def acquire(self) -> int:
        """Waits until this process leads; returns its term. No other call, here or elsewhere, has
        returned the same term, unless the lease was deleted; the first term of a new lease is 1."""
        while True:
            self._term = None
            self._has_news.clear()
            started_at = self._clock()
            try:
                await self._try_to_acquire()
            except LeaseConflict:
                log.debug("another candidate wrote the lease first")
            except LeaseUnavailable as trouble:
                self._report(str(trouble))
            else:
                self._report("")
            if self._term is not None:
                log.info("%s leads, term %d", self._identity, self._term)
                return self._term
            await self._pause(started_at)

    async def hold(self) -> None:
        """Keeps the lease renewed, for as long as the store does not answer too, and ends only by
        an error or when cancelled.

        Raises:
            LeadershipLost: another process holds the lease, or has held it.
        """
        tried_at = self._clock()
        while True:
            await asyncio.sleep(max(0.0, tried_at + self._period_s() - self._clock()))
            tried_at = self._clock()
            await self._try_to_renew()

    async def advance(self, beyond: int) -> int:
        """Moves this leader's term past a number that the stages have seen, since the count starts
        anew after the lease was deleted. Returns the new term.

        Raises:
            LeadershipLost: another process holds the lease or has held it, or the store does not
                answer: then the number is another leader's, as far as one can know.
        """
        give_up_at = self._clock() + (0.0 if self._trouble else self._lease_duration_s)
        while self._clock() < give_up_at:
            transitions = await self._try_to_renew(beyond + 1)
            if transitions is not None:
                return transitions
            await asyncio.sleep(self._period_s())
        trouble = self._trouble or "others write it all the time"
        self._lose(f"the stages know term {beyond}, and the lease cannot be kept: {trouble}")

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
        if record.holder not in ("", self._identity):
            log.warning("%s takes the lease of %s", self._identity, record.holder)
        async with self._writing:
            self._has_claimed = True
            now = self._timestamp()
            claim = replace(
                record,
                holder=self._identity,
                address=self._address,
                transitions=record.transitions + 1,
                acquire_time=now,
                renew_time=now,
            )
            await self._write(claim)
            self._term = claim.transitions

    async def _try_to_renew(self, at_least: int = 0) -> int | None:
        """Writes the lease as its holder, and never with a lower count than before; returns the
        count, or None if it could not be written now.

        Raises:
            LeadershipLost: this process does not lead any more.
        """
        async with self._writing:
            self._check_term()
            try:
                try:
                    transitions = await self._write_as_holder(at_least)
                except LeaseConflict:
                    # Another process has the lease, or a lost write of ours has arrived.
                    await self._check_holder()
                    transitions = await self._write_as_holder(at_least)
            except LeaseConflict:
                return None
            except LeaseUnavailable as trouble:
                self._report(str(trouble))
                return None
            self._report("")
            self._check_term()  # this process may have given the lease up meanwhile
            self._term = transitions
            return transitions

    async def _write_as_holder(self, at_least: int) -> int:
        assert self._record is not None  # read when it was acquired
        transitions = max(at_least, self._term or 0, self._record.transitions)
        renewal = replace(
            self._record,
            holder=self._identity,
            address=self._address,
            transitions=transitions,
            renew_time=self._timestamp(),
        )
        await self._write(renewal)
        return transitions

    async def _check_holder(self) -> None:
        """Reads which process holds the lease. A lease without a holder, since it was emptied or
        made anew, is still this leader's; a lease that another process has held in the meantime is
        not."""
        record = await self._read()
        if record.holder not in ("", self._identity):
            self._lose(f"{record.holder} holds the lease")
        if not record.holder and record.transitions > (self._term or 0):
            self._lose("another has held the lease")

    def _check_term(self) -> None:
        if self._term is None:
            self._lose("it was given up")

    def _lose(self, why: str) -> NoReturn:
        self._term = None
        raise LeadershipLost(f"{self._identity} does not lead any more: {why}")

    async def _empty(self) -> None:
        record = await self._read()
        while record.holder == self._identity:
            vacancy = replace(record, holder="", address="", renew_time=self._timestamp())
            try:
                await self._write(vacancy)
            except LeaseConflict:
                record = await self._read()
            else:
                return

    async def _read(self) -> LeaseRecord:
        return self._observe(await self._limited(self._store.read()))

    async def _write(self, record: LeaseRecord) -> None:
        written = replace(record, duration_s=math.ceil(self._lease_duration_s))
        self._observe(await self._limited(self._store.write(written)))

    async def _limited(self, call: Awaitable[LeaseRecord]) -> LeaseRecord:
        try:
            async with asyncio.timeout(self._call_timeout_s):
                return await call
        except TimeoutError:
            raise LeaseUnavailable(f"no answer within {self._call_timeout_s:g} s") from None

    def _observe(self, record: LeaseRecord) -> LeaseRecord:
        now = self._clock()
        if record == self._record:
            # After an outage the holder must have time to renew before it counts as silent.
            self._silent_s += min(now - self._contact_at, 2 * self._retry_period_s)
        else:
            self._silent_s = 0.0
        self._contact_at = now
        if self._record is None or record.holder != self._record.holder:
            log.info("%s holds the lease", record.holder or "nobody")
        self._record = record
        if self._expires_in_s() > 0 or self.is_leader:
            self._free_since = None
        elif self._free_since is None:
            self._free_since = now
        return record

    def _expires_in_s(self) -> float:
        """Returns the seconds until this process may take the lease, counted from when it last saw
        it; 0 for a lease that is empty, a dead process's, or, after a claim that seemed lost, its
        own."""
        if self._record is None or self._is_free(self._record.holder):
            return 0.0
        # The holder's duration counts: it may have been started with other settings.
        duration_s = self._record.duration_s or self._lease_duration_s
        return duration_s - self._silent_s

    def _is_free(self, holder: str) -> bool:
        is_predecessor = bool(self._predecessors) and holder.startswith(self._predecessors)
        return holder in ("", self._identity, self._dead_holder) or is_predecessor

    async def _pause(self, since: float) -> None:
        """Waits until the next attempt to get the lease: a retry period after `since`, or earlier
        when the lease expires or its holder has died."""
        pause_s = since + self._period_s() - self._clock()
        expires_in_s = self._expires_in_s()
        if expires_in_s > 0:
            pause_s = min(pause_s, expires_in_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, pause_s)):
                await self._has_news.wait()

    def _period_s(self) -> float:
        """Returns the seconds from one attempt to the next."""
        return self._retry_period_s / (1 + (JITTER - 1) * self._jitter())

    def _report(self, trouble: str) -> None:
        """Logs trouble when it changes; an empty text means that there is no trouble."""
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
