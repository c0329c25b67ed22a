"""The elector in simulated time: calls get lost, processes are held up, clocks disagree."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import repeat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.cluster.leader_elector import LeaderElector, LeadershipLost
from services.scheduler.cluster.lease import LeaseConflict, LeaseRecord, LeaseUnavailable
from tests.simulated_time import StoppableProcess, simulate

LEASE_S, RENEW_S, RETRY_S = 15.0, 10.0, 2.0
FOREVER = 1e6
NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)


@dataclass(frozen=True)
class Fate:
    """The outcome of a call to the store."""

    request_s: float = 0.01
    answer_s: float = 0.01
    arrives: bool = True
    is_answered: bool = True


GOOD = Fate()
HUNG = Fate(answer_s=FOREVER)
REFUSED = Fate(arrives=False, is_answered=False)
ANSWER_LOST = Fate(is_answered=False)


@dataclass
class Lease:
    """The one lease that everybody sees."""

    record: LeaseRecord = field(default_factory=lambda: LeaseRecord("", 0, 0, "1"))

    def edit(self, **changes: object) -> None:
        """Changes it behind everybody's back."""
        version = str(int(self.record.version) + 1)
        self.record = replace(self.record, **{"version": version} | changes)  # type: ignore[arg-type]

    def put(self, record: LeaseRecord) -> LeaseRecord:
        """Replaces it, unless the version is stale; a write that changes nothing is none."""
        if record.version != self.record.version:
            raise LeaseConflict
        if record != self.record:
            self.record = replace(record, version=str(int(record.version) + 1))
        return self.record


class MemoryLeaseStore:
    """The way to the lease, on which calls meet their fates; a call whose caller has given up goes
    on."""

    def __init__(self, lease: Lease, fates: Iterable[Fate] = repeat(GOOD)) -> None:
        self.lease = lease
        self.fates: Iterator[Fate] = iter(fates)
        self.n_calls = 0
        self._calls: set[asyncio.Task[LeaseRecord | Exception]] = set()

    async def read(self) -> LeaseRecord:
        return await self._call(lambda: self.lease.record)

    async def write(self, record: LeaseRecord) -> LeaseRecord:
        return await self._call(lambda: self.lease.put(record))

    async def _call(self, operation: Callable[[], LeaseRecord]) -> LeaseRecord:
        self.n_calls += 1
        fate = next(self.fates, GOOD)
        call = asyncio.create_task(self._travel(operation, fate))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        result = await asyncio.shield(call)
        if isinstance(result, Exception):
            raise result
        return result

    async def _travel(
        self, operation: Callable[[], LeaseRecord], fate: Fate
    ) -> LeaseRecord | Exception:
        result: LeaseRecord | Exception = LeaseUnavailable("no way there")
        await asyncio.sleep(fate.request_s)
        if fate.arrives:
            try:
                result = operation()
            except LeaseConflict as conflict:
                result = conflict
        await asyncio.sleep(fate.answer_s)
        return result if fate.is_answered else LeaseUnavailable("no way back")


def now() -> float:
    """The simulation's clock."""
    return asyncio.get_running_loop().time()


def candidate(
    lease: Lease | MemoryLeaseStore,
    identity: str = "a",
    *,
    rate: float = 1.0,
    jitter: float = 0.0,
    wall_clock: Callable[[], datetime] = lambda: NOON,
) -> LeaderElector:
    """A candidate with the usual times, whose clock may run too fast."""
    loop = asyncio.get_running_loop()
    return LeaderElector(
        lease if isinstance(lease, MemoryLeaseStore) else MemoryLeaseStore(lease),
        identity=identity,
        lease_duration_s=LEASE_S,
        renew_deadline_s=RENEW_S,
        retry_period_s=RETRY_S,
        clock=lambda: 1000.0 + loop.time() * rate,
        jitter=lambda: jitter,
        now=wall_clock,
    )


def test_the_first_leader_gets_term_1_and_says_who_it_is() -> None:
    async def story() -> None:
        lease = Lease()
        elector = candidate(lease)
        assert not elector.is_leader
        assert await elector.acquire() == 1
        assert elector.is_leader
        assert elector.leader == "a"
        assert (lease.record.holder, lease.record.transitions) == ("a", 1)
        assert lease.record.duration_s == LEASE_S
        assert lease.record.acquire_time == lease.record.renew_time == NOON

    simulate(story())


def test_a_leader_keeps_its_term_for_as_long_as_it_renews() -> None:
    async def story() -> None:
        lease = Lease()
        elector = candidate(lease)
        await elector.acquire()
        other = asyncio.create_task(candidate(lease, "b").acquire())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(300):
                await elector.hold()
        assert elector.is_leader
        assert lease.record.transitions == 1
        assert not other.done()

    simulate(story())


@pytest.mark.parametrize("age_s", [-3600, 0, 3600], ids=["future", "now", "past"])
def test_a_candidate_goes_by_what_it_sees_and_not_by_the_times_in_the_lease(age_s: int) -> None:
    async def story() -> None:
        time = NOON - timedelta(seconds=age_s)
        elector = candidate(Lease(LeaseRecord("gone", 7, 15, "1", time, time)))
        assert await elector.acquire() == 8
        assert 15 <= now() <= 15.1

    simulate(story())


def test_the_holders_lease_duration_counts_and_not_ones_own() -> None:
    async def story() -> None:
        await candidate(Lease(LeaseRecord("gone", 7, 60, "1"))).acquire()
        assert 60 <= now() <= 60.1

    simulate(story())


@pytest.mark.parametrize("jitter", [0.0, 0.5, 1.0])
def test_a_dead_leader_is_replaced_within_the_lease_and_a_retry_period(jitter: float) -> None:
    async def story() -> None:
        lease = Lease()
        elector = candidate(lease)
        await elector.acquire()
        standby = asyncio.create_task(candidate(lease, "b", jitter=jitter).acquire())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(33.3):
                await elector.hold()
        died_at = now()
        assert await standby == 2
        assert now() - died_at <= LEASE_S + RETRY_S
        assert not elector.is_leader

    simulate(story())


def test_a_released_lease_is_taken_within_a_retry_period() -> None:
    async def story() -> None:
        lease = Lease()
        elector = candidate(lease)
        await elector.acquire()
        other = candidate(lease, "b")
        standby = asyncio.create_task(other.acquire())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(31):
                await elector.hold()
        await elector.release()
        assert not elector.is_leader
        released_at = now()
        assert await standby == 2
        assert now() - released_at <= RETRY_S + 0.1
        assert (other.leader, other.is_leader) == ("b", True)

    simulate(story())


def test_a_leader_whose_calls_hang_steps_down_at_its_deadline() -> None:
    async def story() -> None:
        store = MemoryLeaseStore(Lease(), [GOOD, GOOD, *repeat(HUNG, 100)])
        elector = candidate(store)
        await elector.acquire()
        with pytest.raises(LeadershipLost, match=r"not renewed for 10 s: no answer within"):
            await elector.hold()
        assert RENEW_S <= now() <= RENEW_S + 0.1
        assert not elector.is_leader
        assert store.n_calls >= 4  # one that hangs leaves time for another

    simulate(story())


def test_the_deadline_counts_from_before_the_renewal_was_sent() -> None:
    async def story() -> None:
        fates = [GOOD, GOOD, Fate(answer_s=4.9), *repeat(HUNG, 100)]
        elector = candidate(MemoryLeaseStore(Lease(), fates))
        await elector.acquire()
        with pytest.raises(LeadershipLost):
            await elector.hold()
        assert RETRY_S + RENEW_S <= now() <= RETRY_S + RENEW_S + 0.1

    simulate(story())


def test_a_leader_that_cannot_see_who_holds_the_lease_steps_down_at_its_deadline() -> None:
    async def story() -> None:
        fates = [GOOD, GOOD, ANSWER_LOST, GOOD, *repeat(HUNG, 100)]
        elector = candidate(MemoryLeaseStore(Lease(), fates))
        await elector.acquire()
        with pytest.raises(LeadershipLost, match="no answer"):
            await elector.hold()
        assert RENEW_S <= now() <= RENEW_S + 0.1

    simulate(story())


class SlowProcess(MemoryLeaseStore):
    """Time passes for the process between the answer to a write and its look at the answer."""

    held_up_s: float = 0.0
    n_slow: int = 1

    async def write(self, record: LeaseRecord) -> LeaseRecord:
        written = await super().write(record)
        if self.n_slow > 0:
            self.n_slow -= 1
            self.held_up_s += 60
        return written

    def candidate(self) -> LeaderElector:
        loop = asyncio.get_running_loop()
        return LeaderElector(self, identity="a", clock=lambda: loop.time() + self.held_up_s)


def test_a_claim_that_took_too_long_is_made_again() -> None:
    async def story() -> None:
        elector = SlowProcess(Lease()).candidate()
        assert await elector.acquire() == 2
        assert elector.is_leader

    simulate(story())


def test_a_term_that_took_too_long_to_advance_is_none() -> None:
    async def story() -> None:
        store = SlowProcess(Lease())
        store.n_slow = 0
        elector = store.candidate()
        await elector.acquire()
        store.n_slow = 1
        with pytest.raises(LeadershipLost):
            await elector.advance(41)

    simulate(story())


def test_a_leader_survives_an_api_server_that_fails_for_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    async def story() -> None:
        lease = Lease()
        elector = candidate(MemoryLeaseStore(lease, [GOOD, GOOD, *repeat(REFUSED, 3)]))
        await elector.acquire()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await elector.hold()
        assert elector.is_leader
        assert lease.record.transitions == 1

    simulate(story())
    messages = [record.message for record in caplog.records]
    assert messages.count("the lease cannot be kept: no way back") == 1
    assert messages.count("the lease can be read and written again") == 1


def test_a_renewal_whose_answer_is_lost_is_no_lost_race() -> None:
    async def story() -> None:
        lease = Lease()
        elector = candidate(MemoryLeaseStore(lease, [GOOD, GOOD, ANSWER_LOST]))
        await elector.acquire()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await elector.hold()
        assert elector.is_leader

    simulate(story())


def test_a_claim_whose_answer_is_lost_ends_in_a_term_of_its_own() -> None:
    async def story() -> None:
        lease = Lease()
        elector = candidate(MemoryLeaseStore(lease, [GOOD, ANSWER_LOST]))
        assert await elector.acquire() == 2
        assert lease.record.transitions == 2
        assert now() < LEASE_S  # it knows its own name

    simulate(story())


@pytest.mark.parametrize("holder", ["b", ""], ids=["another", "nobody"])
def test_a_leader_whose_lease_somebody_has_edited_stops_at_its_next_renewal(holder: str) -> None:
    async def story() -> None:
        lease = Lease()
        elector = candidate(lease)
        await elector.acquire()
        lease.edit(holder=holder)
        with pytest.raises(LeadershipLost, match=f"{holder or 'nobody'} holds the lease"):
            await elector.hold()
        assert now() < RETRY_S + 0.2
        assert not elector.is_leader

    simulate(story())


def test_a_leader_goes_on_when_only_the_leases_labels_were_edited() -> None:
    async def story() -> None:
        lease = Lease()
        elector = candidate(lease)
        await elector.acquire()
        lease.edit()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(20):
                await elector.hold()
        assert elector.is_leader

    simulate(story())


def test_a_wall_clock_that_stands_or_jumps_costs_nobody_the_lease() -> None:
    async def story() -> None:
        lease = Lease()
        times = iter([NOON, *repeat(NOON - timedelta(hours=3), 50), *repeat(NOON, 50)])
        elector = candidate(lease, wall_clock=lambda: next(times))
        await elector.acquire()
        standby = asyncio.create_task(candidate(lease, "b").acquire())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(120):
                await elector.hold()
        assert elector.is_leader
        assert not standby.done()

    simulate(story())


def test_a_process_that_was_stopped_does_not_lead_when_it_wakes() -> None:
    async def story() -> None:
        lease = Lease()
        elector = candidate(lease)
        await elector.acquire()
        process = StoppableProcess()
        holding = asyncio.create_task(process.run(elector.hold()))
        standby = asyncio.create_task(candidate(lease, "b").acquire())
        await asyncio.sleep(5)
        process.stop()
        assert await standby == 2
        assert not elector.is_leader  # before any of its code has run
        process.go_on()
        with pytest.raises(LeadershipLost, match="held up"):
            await holding
        assert lease.record.holder == "b"

    simulate(story())


def test_a_process_that_was_stopped_while_it_renewed_does_not_lead_either() -> None:
    async def story() -> None:
        lease = Lease()
        elector = candidate(MemoryLeaseStore(lease, [GOOD, GOOD, Fate(request_s=1)]))
        await elector.acquire()
        process = StoppableProcess()
        holding = asyncio.create_task(process.run(elector.hold()))
        await asyncio.sleep(2.5)
        process.stop()
        await asyncio.sleep(60)
        assert not elector.is_leader
        process.go_on()
        with pytest.raises(LeadershipLost):
            await holding

    simulate(story())


def test_a_candidate_that_was_stopped_overwrites_nobody() -> None:
    async def story() -> None:
        lease = Lease(LeaseRecord("gone", 1, 15, "1"))
        process = StoppableProcess()
        late = asyncio.create_task(process.run(candidate(lease).acquire()))
        await asyncio.sleep(14)
        process.stop()
        elector = candidate(lease, "b")
        await elector.acquire()
        process.go_on()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await elector.hold()
        assert elector.is_leader
        assert not late.done()

    simulate(story())


def test_advance_moves_the_term_past_what_the_workers_have_seen() -> None:
    async def story() -> None:
        lease = Lease()
        elector = candidate(lease)
        assert await elector.acquire() == 1
        assert await elector.advance(41) == 42
        assert lease.record.transitions == 42
        assert await elector.advance(3) == 42
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(20):
                await elector.hold()
        assert lease.record.transitions == 42
        await elector.release()
        assert await candidate(lease, "b").acquire() == 43

    simulate(story())


def test_advance_and_renewals_do_not_disturb_each_other() -> None:
    async def story() -> None:
        lease = Lease()
        elector = candidate(MemoryLeaseStore(lease, [GOOD, GOOD, *repeat(Fate(0.5, 0.5), 100)]))
        await elector.acquire()
        holding = asyncio.create_task(elector.hold())
        for beyond in range(10, 20):
            await asyncio.sleep(0.7)
            assert await elector.advance(beyond) == beyond + 1
        assert elector.is_leader
        assert not holding.done()

    simulate(story())


def test_an_advance_whose_answer_is_lost_succeeds_and_is_never_taken_back() -> None:
    async def story() -> None:
        lease = Lease()
        elector = candidate(MemoryLeaseStore(lease, [GOOD, GOOD, ANSWER_LOST]))
        await elector.acquire()
        assert await elector.advance(41) == 42
        assert lease.record.transitions == 42

    simulate(story())


def test_an_advance_that_was_given_up_but_arrived_is_not_taken_back() -> None:
    async def story() -> None:
        lease = Lease()
        elector = candidate(MemoryLeaseStore(lease, [GOOD, GOOD, Fate(request_s=1)]))
        await elector.acquire()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await elector.advance(41)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(20):
                await elector.hold()
        assert elector.is_leader
        assert lease.record.transitions == 42

    simulate(story())


def test_advance_fails_for_who_does_not_hold_the_lease() -> None:
    async def story() -> None:
        lease = Lease()
        elector = candidate(lease)
        await elector.acquire()
        lease.edit(holder="b")
        with pytest.raises(LeadershipLost, match="b holds the lease"):
            await elector.advance(41)
        assert lease.record.transitions == 1
        await elector.release()
        assert lease.record.holder == "b"

    simulate(story())


@pytest.mark.parametrize("fate", [HUNG, REFUSED], ids=["hung", "refused"])
def test_release_gives_a_dead_api_server_little_time_and_raises_nothing(
    fate: Fate, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        elector = candidate(MemoryLeaseStore(Lease(), [GOOD, GOOD, *repeat(fate, 9)]))
        await elector.acquire()
        started_at = now()
        await elector.release()
        assert now() - started_at < RENEW_S
        assert not elector.is_leader

    simulate(story())
    assert "has to expire: no" in caplog.text


def test_release_ends_hold_and_works_while_a_renewal_is_on_its_way() -> None:
    async def story() -> None:
        lease = Lease()
        elector = candidate(MemoryLeaseStore(lease, [GOOD, GOOD, Fate(1, 1)]))
        await elector.acquire()
        holding = asyncio.create_task(elector.hold())
        await asyncio.sleep(2.5)
        await elector.release()
        assert lease.record.holder == ""
        with pytest.raises(LeadershipLost, match="given up"):
            await holding
        assert lease.record.holder == ""

    simulate(story())


def test_release_finds_a_claim_that_arrived_after_its_caller_was_gone() -> None:
    async def story() -> None:
        lease = Lease()
        elector = candidate(MemoryLeaseStore(lease, [GOOD, Fate(request_s=1)]))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await elector.acquire()
        await asyncio.sleep(1)
        assert lease.record.holder == "a"
        await elector.release()
        assert lease.record.holder == ""

    simulate(story())


def test_release_of_a_standby_calls_nobody() -> None:
    async def story() -> None:
        store = MemoryLeaseStore(Lease(LeaseRecord("b", 1, 15, "1")))
        elector = candidate(store)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await elector.acquire()
        n_calls = store.n_calls
        await elector.release()
        assert store.n_calls == n_calls

    simulate(story())


def test_only_the_same_process_is_taken_for_the_holder() -> None:
    async def story() -> None:
        lease = Lease(LeaseRecord("pod-0_uid_1", 3, 15, "1"))
        assert await candidate(lease, "pod-0_uid_1").acquire() == 4
        assert now() < 1
        assert await candidate(lease, "pod-0_uid_2").acquire() == 5
        assert now() > LEASE_S

    simulate(story())


def test_a_candidate_is_synced_for_as_long_as_the_store_answers() -> None:
    async def story() -> None:
        lease = Lease(LeaseRecord("b", 1, 1000, "1"))
        elector = candidate(MemoryLeaseStore(lease, [*repeat(GOOD, 3), *repeat(REFUSED, 100)]))
        assert not elector.synced
        acquiring = asyncio.create_task(elector.acquire())
        await asyncio.sleep(1)
        assert elector.synced
        assert elector.leader == "b"
        await asyncio.sleep(15)
        assert elector.synced
        await asyncio.sleep(10)
        assert not elector.synced
        acquiring.cancel()

    simulate(story())


def test_trouble_is_logged_when_it_changes_and_not_at_each_attempt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story() -> None:
        fates = [*repeat(REFUSED, 5), GOOD, *repeat(Fate(arrives=False), 1)]
        await candidate(MemoryLeaseStore(Lease(), fates)).acquire()

    simulate(story())
    messages = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert messages == [
        "the lease cannot be kept: no way back",
        "the lease cannot be kept: no way there",
    ]


@pytest.mark.parametrize(("lease_s", "renew_s", "retry_s"), [(10, 10, 2), (15, 2, 2), (15, 10, 0)])
def test_times_that_cannot_work_are_refused(lease_s: float, renew_s: float, retry_s: float) -> None:
    with pytest.raises(ValueError, match="retry_period_s"):
        LeaderElector(
            MemoryLeaseStore(Lease()),
            identity="a",
            lease_duration_s=lease_s,
            renew_deadline_s=renew_s,
            retry_period_s=retry_s,
        )


def test_an_empty_identity_is_refused() -> None:
    with pytest.raises(ValueError, match="identity"):
        LeaderElector(MemoryLeaseStore(Lease()), identity="")


@dataclass
class Member:
    """A process that wants to lead, again and again."""

    elector: LeaderElector
    process: StoppableProcess


@dataclass
class Election:
    """Candidates that compete, and what must hold whenever one of them wins."""

    lease: Lease = field(default_factory=Lease)
    members: list[Member] = field(default_factory=list)
    terms: list[int] = field(default_factory=list)

    def add(self, fates: list[Fate], rate: float, jitter: float) -> None:
        store = MemoryLeaseStore(self.lease, fates)
        elector = candidate(store, f"m{len(self.members)}", rate=rate, jitter=jitter)
        self.members.append(Member(elector, StoppableProcess()))

    async def campaign(self, member: Member) -> None:
        while True:
            self.check(member, await member.elector.acquire())
            try:
                await member.elector.hold()
            except LeadershipLost:
                assert not member.elector.is_leader

    def check(self, winner: Member, term: int) -> None:
        """Nobody else can start to lead at another moment, so that this one is all that counts."""
        leaders = [m.elector.identity for m in self.members if m.elector.is_leader]
        assert leaders == [winner.elector.identity]
        assert term > max(self.terms, default=0)
        self.terms.append(term)


durations_s = st.one_of(st.just(0.01), st.floats(0, 3), st.floats(0, 20))
fates = st.builds(Fate, durations_s, durations_s, st.booleans(), st.booleans())
stops = st.tuples(st.integers(0, 2), st.floats(0, 30), st.floats(0, 40))
TROUBLED_S, CALM_S = 150.0, 100.0


@settings(max_examples=80, deadline=None)
@given(
    fates=st.lists(st.lists(st.one_of(st.just(GOOD), fates), max_size=40), min_size=3, max_size=3),
    rates=st.lists(st.floats(0.9, 1.1), min_size=3, max_size=3),
    jitters=st.lists(st.floats(0, 1), min_size=3, max_size=3),
    stops=st.lists(stops, max_size=6),
)
def test_there_are_never_two_leaders_and_at_last_there_is_one(
    fates: list[list[Fate]],
    rates: list[float],
    jitters: list[float],
    stops: list[tuple[int, float, float]],
) -> None:
    async def story() -> None:
        election = Election()
        for of_member in zip(fates, rates, jitters, strict=True):
            election.add(*of_member)
        campaigns = [
            asyncio.create_task(member.process.run(election.campaign(member)))
            for member in election.members
        ]
        for index, after_s, for_s in stops:
            await asyncio.sleep(after_s)
            process = election.members[index].process
            process.stop()
            asyncio.get_running_loop().call_later(for_s, process.go_on)
        await asyncio.sleep(TROUBLED_S + CALM_S)
        for campaign in campaigns:
            assert not campaign.done() or campaign.result()
        assert sum(member.elector.is_leader for member in election.members) == 1

    simulate(story())
