"""The election: decides, by a lease, which of several schedulers leads.

A candidate takes the lease in three cases: its holder has given it away; the holder is certainly
dead; or the record of the lease has not changed for the lease's duration (`observed_lease.py`). The
times in the record come from other machines and decide nothing. A time in which the API server did
not answer says nothing about the holder. The holder is certainly dead when it ran in the container
in which this process runs now, or when the leader watch says so (`leader_watch.py`).

A lease that an operator has deleted or emptied still belongs to the leader, which writes it again
at its next renewal. A candidate takes such a lease only after it has seen no renewal for `RENEWAL`
retry periods, also in a new deployment, where it cannot know that there is no leader.

A leader leads until it learns that another process holds the lease, or that the stages have seen a
later term. A failed renewal is no reason to stop. A standby that can read the lease takes over when
the lease has expired; while the API server answers no process, nothing changes.

So two processes may believe that they lead, and no clock prevents that. The stages prevent harm:
every acquisition of the lease has a term higher than all earlier terms, each term has its own range
of epochs (`term.py`), and a stage accepts only messages of the newest epoch that it has joined. A
deposed leader can form epochs by itself only in the range of its own, older term. As soon as the
stages know a newer epoch, the deposed leader has to read the lease; it steps down if the lease
names another holder or cannot be read. Of two leaders, the leader with the later term takes over
the stages once, and the other leader never gets them back.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import NoReturn

from services.scheduler.cluster.leadership import GivenAway, LeadershipLost
from services.scheduler.cluster.lease import (
    LeaseConflict,
    LeaseStore,
    LeaseUnavailable,
)
from services.scheduler.cluster.observed_lease import ObservedLease

log = logging.getLogger(__name__)

JITTER = 1.2
"""Longest pause between two attempts, which is the retry period, divided by the shortest pause."""

SUCCESSION_PERIOD_S = 0.2
"""Seconds between two checks whether the next leader has taken the lease."""


def wall_clock() -> datetime:
    """Returns the time of day, which the lease shows to operators."""
    return datetime.now(UTC)


class LeaderElector:
    """One candidate of the election. Calls of its methods may overlap; one call at a time writes
    the lease."""

    def __init__(
        self,
        store: LeaseStore,
        *,
        identity: str,
        address: str = "",
        predecessors: str = "",
        model: Callable[[], str] = lambda: "",
        lease_duration_s: float = 8.0,
        retry_period_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
        now: Callable[[], datetime] = wall_clock,
    ) -> None:
        """Creates a candidate. Other processes connect to `address` to see whether this process
        still runs. `predecessors` is a prefix of identities: processes whose identities begin with
        it have ended, because this process runs in their container. The prefix is empty if no such
        processes are known. `model` returns the description of the model that is served, or
        was served last, as far as this process knows; the description is written into the lease."""
        if not 0 < 2 * retry_period_s < lease_duration_s:
            raise ValueError(
                "retry_period_s must be less than half of lease_duration_s: "
                f"{retry_period_s:g}, {lease_duration_s:g}"
            )
        if not identity:
            raise ValueError("identity must not be empty: an empty holder means that none leads")
        self._identity = identity
        self._address = address
        self._model = model
        self._lease_duration_s = lease_duration_s
        self._retry_period_s = retry_period_s
        self._clock = clock
        self._jitter = jitter
        self._now = now
        self._writing = asyncio.Lock()
        self._has_news = asyncio.Event()  # a holder has died
        self._term: int | None = None
        self._loss: LeadershipLost | None = None  # why this process, which has led, does not lead
        # Whether a claim was sent: the store may execute a claim after its timeout here.
        self._has_claimed = False
        # No other process takes the lease so soon after a renewal, also if its clock is faster.
        self._surely_held_s = lease_duration_s - retry_period_s
        self._renewed_at = clock()
        self._trouble = ""
        self._lease = ObservedLease(
            store,
            identity=identity,
            predecessors=predecessors,
            lease_duration_s=lease_duration_s,
            retry_period_s=retry_period_s,
            clock=clock,
            leads=lambda: self.is_leader,
        )

    @property
    def identity(self) -> str:
        """Name of this process in the lease. No other process may ever have the same name."""
        return self._identity

    @property
    def leader(self) -> str:
        """Identity of the process that held the lease when this process last read or wrote it;
        empty if no process held it."""
        return self._lease.holder

    @property
    def leader_address(self) -> str:
        """Address of the process that held the lease when this process last read or wrote it; empty
        if the lease had no address."""
        return self._lease.record.address if self._lease.record else ""

    @property
    def model(self) -> str:
        """Description of the model that was served last, from the lease as this process last read
        or wrote it; empty if the lease had none."""
        return self._lease.record.model if self._lease.record else ""

    @property
    def leader_renews(self) -> bool:
        """Whether this process has seen the present holder renew the lease."""
        return self._lease.leader_renews

    @property
    def is_leader(self) -> bool:
        """Whether this process leads, as far as it knows."""
        return self._term is not None

    @property
    def could_take_over(self) -> bool:
        """Whether this candidate could take the lease when its holder loses it (see
        `ObservedLease.may_soon_be_taken`)."""
        return self._lease.may_soon_be_taken

    def note_death(self, holder: str) -> None:
        """Notes that the process with the identity `holder` has ended. If that process holds the
        lease, `acquire` takes the lease at once."""
        self._lease.note_death(holder)
        self._has_news.set()

    async def acquire(self) -> int:
        """Waits until this process leads. Returns its term, which is 1 for a new lease. No two
        calls of any processes return the same term, unless the lease was deleted while no process
        led."""
        while True:
            self._term = self._loss = None
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
        """Renews the lease repeatedly, until this process gives the lease away or loses the lead.
        Failures of the store are logged and do not end the renewals.

        Raises:
            LeadershipLost: another process holds the lease, or has held it.
        """
        tried_at = self._clock()
        while True:
            await asyncio.sleep(max(0.0, tried_at + self._period_s() - self._clock()))
            tried_at = self._clock()
            try:
                await self._try_to_renew()
            except GivenAway:
                return

    async def advance(self, beyond: int) -> int:
        """Moves this leader's term past the term `beyond`, which the stages have seen, and returns
        the new term. After the lease was deleted, terms start at 1 again and must be moved past the
        terms that the stages know.

        Raises:
            LeadershipLost: another process holds the lease or has held it, or the store does not
                answer. In the last case `beyond` may be the term of another leader.
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
        """Gives the lease away, so that another candidate can take it at once. Takes at most the
        timeout of one call. Raises nothing if the store does not answer."""
        self._term = None
        self._loss = GivenAway(f"{self._identity} has given the lease away")
        if not self._has_claimed:
            return
        try:
            async with asyncio.timeout(self._lease.call_timeout_s), self._writing:
                await self._empty()
        except (TimeoutError, LeaseConflict, LeaseUnavailable) as trouble:
            log.warning(
                "the lease was not released and has to expire: %s", str(trouble) or "no answer"
            )

    async def wait_for_successor(self) -> None:
        """Waits until another process holds the lease that this process has given away."""
        while self.leader in ("", self._identity):
            await asyncio.sleep(SUCCESSION_PERIOD_S)
            with contextlib.suppress(LeaseUnavailable):
                await self._lease.read()

    async def _try_to_acquire(self) -> None:
        record = await self._lease.read()
        if self._lease.expires_in_s() > 0:
            return
        if record.holder not in ("", self._identity):
            log.warning("%s takes the lease of %s", self._identity, record.holder)
        async with self._writing:
            self._has_claimed = True
            now, self._renewed_at = self._timestamp(), self._clock()
            claim = replace(
                record,
                holder=self._identity,
                address=self._address,
                is_released=False,
                transitions=record.transitions + 1,
                acquire_time=now,
                renew_time=now,
            )
            await self._lease.write(claim)
            self._term = claim.transitions

    async def _try_to_renew(self, at_least: int = 0) -> int | None:
        """Writes the lease as its holder. Returns the lease's number of acquisitions, which is the
        term, or None if the lease could not be written now. The number never falls, and is at least
        `at_least`.

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
        assert self._lease.record is not None  # the lease was read when it was acquired
        transitions = max(at_least, self._term or 0, self._lease.record.transitions)
        renewal = replace(
            self._lease.record,
            holder=self._identity,
            address=self._address,
            model=self._model() or self._lease.record.model,
            is_released=False,
            transitions=transitions,
            renew_time=self._timestamp(),
        )
        renewed_at = self._clock()
        await self._lease.write(renewal)
        self._renewed_at = renewed_at
        return transitions

    async def _check_holder(self) -> None:
        """Reads the lease. Raises LeadershipLost if another process holds the lease, or has held it
        since this leader's last renewal. A lease that was only deleted or emptied still belongs to
        this leader, unless that renewal is so long ago that another process may have held the lease
        in between."""
        record = await self._lease.read()
        if record.holder not in ("", self._identity):
            self._lose(f"{record.holder} holds the lease")
        if not record.holder and record.transitions > (self._term or 0):
            self._lose("another has held the lease")
        if not record.holder and self._clock() - self._renewed_at > self._surely_held_s:
            self._lose("another may have held the lease before it was deleted")

    def _check_term(self) -> None:
        if self._loss is not None:
            raise self._loss

    def _lose(self, why: str) -> NoReturn:
        self._term = None
        self._loss = LeadershipLost(f"{self._identity} does not lead any more: {why}")
        raise self._loss

    async def _empty(self) -> None:
        record = await self._lease.read()
        while record.holder == self._identity:
            now = self._timestamp()
            vacancy = replace(record, holder="", address="", is_released=True, renew_time=now)
            try:
                await self._lease.write(vacancy)
            except LeaseConflict:
                record = await self._lease.read()
            else:
                return

    async def _pause(self, since: float) -> None:
        """Waits until one retry period, shortened at random, has passed since the time `since`.
        Returns earlier if the lease expires or its holder dies."""
        pause_s = since + self._period_s() - self._clock()
        expires_in_s = self._lease.expires_in_s()
        if expires_in_s > 0:
            pause_s = min(pause_s, expires_in_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, pause_s)):
                await self._has_news.wait()

    def _period_s(self) -> float:
        return self._retry_period_s / (1 + (JITTER - 1) * self._jitter())

    def _report(self, trouble: str) -> None:
        """Logs `trouble`, the problem with the lease, if it differs from the last one. An empty
        text means that there is none."""
        if trouble and trouble != self._trouble:
            log.warning("the lease cannot be kept: %s", trouble)
        elif self._trouble and not trouble:
            log.info("the lease can be read and written again")
        self._trouble = trouble

    def _timestamp(self) -> datetime:
        """Returns the present time. If the last renewal in the lease has exactly this time, returns
        a time one microsecond later. Otherwise other candidates would not see the write as a
        renewal."""
        now = self._now()
        if self._lease.record is not None and now == self._lease.record.renew_time:
            now += timedelta(microseconds=1)
        return now
