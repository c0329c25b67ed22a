"""The elector in simulated time: calls get lost, processes are held up, clocks disagree."""

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import repeat

import pytest

from services.scheduler.cluster.leader_elector import SUCCESSION_PERIOD_S, LeaderElector
from services.scheduler.cluster.leadership import LeadershipLost
from services.scheduler.cluster.lease import LeaseRecord
from services.scheduler.cluster.observed_lease import RENEWAL
from tests.memory_lease import ANSWER_LOST, GOOD, HUNG, REFUSED, Fate, Lease, MemoryLeaseStore
from tests.simulated_time import StoppableProcess, simulate

LEASE_S, RETRY_S = 15.0, 2.0
NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)


def now() -> float:
    """The simulation's clock."""
    return asyncio.get_running_loop().time()


def candidate(
    lease: Lease | MemoryLeaseStore,
    identity: str = "a",
    *,
    predecessors: str = "",
    rate: float = 1.0,
    jitter: float = 0.0,
    wall_clock: Callable[[], datetime] = lambda: NOON,
) -> LeaderElector:
    """A candidate with the usual times, whose clock may run too fast."""
    loop = asyncio.get_running_loop()
    return LeaderElector(
        lease if isinstance(lease, MemoryLeaseStore) else MemoryLeaseStore(lease),
        identity=identity,
        address=f"{identity}:50052",
        predecessors=predecessors,
        lease_duration_s=LEASE_S,
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
        succession = asyncio.create_task(elector.wait_for_successor())
        assert await standby == 2
        assert now() - released_at <= RETRY_S + 0.1
        assert not succession.done()
        await succession
        assert now() - released_at <= RETRY_S + 0.1 + 2 * SUCCESSION_PERIOD_S
        assert (other.leader, other.is_leader) == ("b", True)

    simulate(story())


@pytest.mark.parametrize("away_s", [20, 75, 300])
@pytest.mark.parametrize("fate", [HUNG, REFUSED], ids=["hangs", "refuses"])
def test_an_api_server_that_is_away_for_all_changes_nothing(fate: Fate, away_s: float) -> None:
    async def story() -> None:
        lease = Lease()
        stores = [MemoryLeaseStore(lease), MemoryLeaseStore(lease)]
        leader, standby = candidate(stores[0], "a"), candidate(stores[1], "b")
        await leader.acquire()
        holding = asyncio.create_task(leader.hold())
        acquiring = asyncio.create_task(standby.acquire())
        await asyncio.sleep(20)
        assert standby.could_take_over
        stores[0].fates = stores[1].fates = repeat(fate)
        await asyncio.sleep(away_s)
        assert leader.is_leader
        assert not standby.could_take_over
        stores[1].fates = repeat(GOOD)  # the standby sees the old lease before its holder does
        await asyncio.sleep(4)
        stores[0].fates = repeat(GOOD)
        await asyncio.sleep(100)
        assert leader.is_leader
        assert standby.could_take_over
        assert not holding.done()
        assert not acquiring.done()
        assert (lease.record.holder, lease.record.transitions) == ("a", 1)

    simulate(story())


def test_a_leader_that_alone_is_cut_from_the_api_server_is_replaced_and_steps_down() -> None:
    async def story() -> None:
        lease = Lease()
        store = MemoryLeaseStore(lease)
        leader = candidate(store, "a")
        await leader.acquire()
        holding = asyncio.create_task(leader.hold())
        acquiring = asyncio.create_task(candidate(lease, "b").acquire())
        await asyncio.sleep(20)
        store.fates = repeat(REFUSED)
        cut_at = now()
        assert await acquiring == 2
        assert now() - cut_at <= LEASE_S + RETRY_S
        await asyncio.sleep(30)
        assert leader.is_leader  # the stages have the last word meanwhile
        store.fates = repeat(GOOD)
        with pytest.raises(LeadershipLost, match="b holds the lease"):
            await holding
        assert lease.record.holder == "b"

    simulate(story())


def test_a_standby_that_cannot_reach_the_api_server_never_takes_over() -> None:
    async def story() -> None:
        store = MemoryLeaseStore(
            Lease(LeaseRecord("gone", 1, 15, "1")), [GOOD, *repeat(REFUSED, 99)]
        )
        standby = candidate(store)
        standby.note_death("gone")
        acquiring = asyncio.create_task(standby.acquire())
        await asyncio.sleep(90)
        assert not acquiring.done()
        assert not standby.could_take_over

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


def test_a_leader_whose_lease_another_has_stops_at_its_next_renewal() -> None:
    async def story() -> None:
        lease = Lease()
        elector = candidate(lease)
        await elector.acquire()
        lease.edit(holder="b")
        with pytest.raises(LeadershipLost, match="b holds the lease"):
            await elector.hold()
        assert now() < RETRY_S + 0.2
        assert not elector.is_leader

    simulate(story())


EMPTIED: dict[str, object] = {"holder": "", "address": ""}


@pytest.mark.parametrize(
    "edit",
    [
        lambda lease: lease.delete(),
        lambda lease: lease.edit(**EMPTIED, transitions=0),
        lambda lease: lease.edit(**EMPTIED),
    ],
    ids=["deleted", "made anew", "emptied"],
)
@pytest.mark.parametrize("at_s", [20.0, 20.7, 21.4], ids=str)
def test_a_lease_without_a_holder_stays_its_leaders_and_the_standby_can_take_over_later(
    edit: Callable[[Lease], None], at_s: float
) -> None:
    async def story() -> None:
        lease = Lease()
        leader, standby = candidate(lease), candidate(lease, "b", jitter=1.0)
        await leader.acquire()
        holding = asyncio.create_task(leader.hold())
        acquiring = asyncio.create_task(standby.acquire())
        await asyncio.sleep(at_s)
        edit(lease)
        await asyncio.sleep(RETRY_S + 0.1)
        assert (lease.record.holder, lease.record.transitions) == ("a", 1)
        assert lease.record.address == "a:50052"
        await asyncio.sleep(60)
        assert leader.is_leader
        assert standby.could_take_over
        assert not acquiring.done()
        holding.cancel()
        standby.note_death("a")
        assert await acquiring == 2

    simulate(story())


def test_without_a_lease_one_of_two_candidates_makes_it_when_no_leader_has() -> None:
    async def story() -> None:
        lease = Lease()
        lease.delete()
        electors = [candidate(lease, "a"), candidate(lease, "b")]
        acquiring = [asyncio.create_task(elector.acquire()) for elector in electors]
        await asyncio.sleep(RENEWAL * RETRY_S + 0.1)
        assert sorted(task.done() for task in acquiring) == [False, True]
        assert lease.record.transitions == 1
        await asyncio.sleep(LEASE_S / 2)
        assert [elector.could_take_over for elector in electors if not elector.is_leader] == [True]

    simulate(story())


def test_a_holder_is_seen_to_renew_or_not() -> None:
    async def story() -> None:
        lease = Lease()
        leader, standby = candidate(lease), candidate(lease, "b")
        await leader.acquire()
        acquiring = asyncio.create_task(standby.acquire())
        await asyncio.sleep(5)
        assert not standby.leader_renews
        holding = asyncio.create_task(leader.hold())
        await asyncio.sleep(5)
        assert standby.leader_renews
        holding.cancel()
        lease.edit(holder="c")
        await asyncio.sleep(5)
        assert not standby.leader_renews
        acquiring.cancel()

    simulate(story())


def test_a_leader_does_not_come_back_after_another() -> None:
    async def story() -> None:
        lease = Lease()
        elector = candidate(lease)
        await elector.acquire()
        lease.edit(holder="", transitions=2)  # taken and given back while this one was cut off
        with pytest.raises(LeadershipLost, match="another has held the lease"):
            await elector.hold()
        assert lease.record.holder == ""

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


def test_a_process_that_was_stopped_learns_that_it_does_not_lead_when_it_wakes() -> None:
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
        process.go_on()
        with pytest.raises(LeadershipLost, match="b holds the lease"):
            await holding
        assert lease.record.holder == "b"

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


def test_a_leader_that_cannot_ask_the_lease_yields_at_once_to_a_later_term() -> None:
    async def story() -> None:
        elector = candidate(MemoryLeaseStore(Lease(), [GOOD, GOOD, *repeat(REFUSED, 99)]))
        await elector.acquire()
        holding = asyncio.create_task(elector.hold())
        await asyncio.sleep(60)
        assert elector.is_leader
        started_at = now()
        with pytest.raises(LeadershipLost, match=r"know term 2, and the lease .*: no way back"):
            await elector.advance(2)
        assert now() == started_at
        with pytest.raises(LeadershipLost):
            await holding

    simulate(story())


def test_advance_gives_up_when_the_store_does_not_answer() -> None:
    async def story() -> None:
        elector = candidate(MemoryLeaseStore(Lease(), [GOOD, GOOD, *repeat(HUNG, 99)]))
        await elector.acquire()
        with pytest.raises(LeadershipLost, match="no answer within"):
            await elector.advance(2)
        assert now() <= 2 * LEASE_S
        assert not elector.is_leader

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
        assert now() - started_at < LEASE_S
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
        assert (lease.record.holder, lease.record.is_released) == ("", True)
        await holding
        assert (lease.record.holder, lease.record.is_released) == ("", True)
        with pytest.raises(LeadershipLost, match="given the lease away"):
            await elector.advance(2)

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


def test_a_container_that_starts_again_takes_the_lease_of_the_one_before_at_once() -> None:
    async def story() -> None:
        lease = Lease(LeaseRecord("pod-0_uid_1", 3, 15, "1"))
        assert await candidate(lease, "pod-0_uid_2", predecessors="pod-0_uid_").acquire() == 4
        assert now() < 0.1
        other = candidate(lease, "pod-0_other_3", predecessors="pod-0_other_")
        assert await other.acquire() == 5
        assert now() > LEASE_S

    simulate(story())


def test_the_lease_of_a_dead_leader_is_taken_at_once_and_only_its() -> None:
    async def story() -> None:
        lease = Lease()
        leader = candidate(lease, "a")
        await leader.acquire()
        standby = candidate(lease, "b")
        acquiring = asyncio.create_task(standby.acquire())
        holding = asyncio.create_task(leader.hold())
        await asyncio.sleep(20.5)
        assert standby.leader_address == "a:50052"
        standby.note_death("somebody else")
        await asyncio.sleep(5)
        assert not acquiring.done()
        holding.cancel()
        died_at = now()
        standby.note_death("a")
        assert await acquiring == 2
        assert now() - died_at < 0.1
        assert lease.record.address == "b:50052"

    simulate(story())


def test_of_two_that_see_a_leader_dead_one_takes_the_lease() -> None:
    async def story() -> None:
        lease = Lease(LeaseRecord("gone", 1, 15, "1"))
        electors = [candidate(lease, "a"), candidate(lease, "b")]
        acquiring = [asyncio.create_task(elector.acquire()) for elector in electors]
        await asyncio.sleep(1)
        for elector in electors:
            elector.note_death("gone")
        await asyncio.sleep(10)
        assert sorted(task.done() for task in acquiring) == [False, True]
        assert lease.record.transitions == 2

    simulate(story())


def test_a_candidate_could_take_over_for_as_long_as_the_store_answers() -> None:
    async def story() -> None:
        lease = Lease(LeaseRecord("b", 1, 1000, "1"))
        elector = candidate(MemoryLeaseStore(lease, [*repeat(GOOD, 3), *repeat(REFUSED, 100)]))
        assert not elector.could_take_over
        acquiring = asyncio.create_task(elector.acquire())
        await asyncio.sleep(1)
        assert elector.could_take_over
        assert elector.leader == "b"
        await asyncio.sleep(15)
        assert elector.could_take_over
        await asyncio.sleep(10)
        assert not elector.could_take_over
        acquiring.cancel()

    simulate(story())


def test_a_candidate_that_sees_a_dead_holder_and_does_nothing_could_not_take_over() -> None:
    async def story() -> None:
        may_not_write = MemoryLeaseStore(Lease(LeaseRecord("gone", 1, 15, "1")))
        may_not_write.refuses_writes = True
        elector = candidate(may_not_write)
        acquiring = asyncio.create_task(elector.acquire())
        await asyncio.sleep(LEASE_S - 1)
        assert elector.could_take_over
        await asyncio.sleep(10)
        assert not elector.could_take_over
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


@pytest.mark.parametrize(("lease_s", "retry_s"), [(4, 2), (2, 2), (15, 0)])
def test_times_that_cannot_work_are_refused(lease_s: float, retry_s: float) -> None:
    with pytest.raises(ValueError, match="retry_period_s"):
        LeaderElector(
            MemoryLeaseStore(Lease()),
            identity="a",
            lease_duration_s=lease_s,
            retry_period_s=retry_s,
        )


def test_an_empty_identity_is_refused() -> None:
    with pytest.raises(ValueError, match="identity"):
        LeaderElector(MemoryLeaseStore(Lease()), identity="")
