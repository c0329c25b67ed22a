"""The watch over the leader: who is plainly dead, and who only does not answer."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from services.scheduler.cluster.leader_watch import AGAIN_S, LeaderWatch, ProbeResult, ask
from services.scheduler.cluster.pod_directory import PodState, PodsUnavailable
from tests.simulated_time import simulate

HOLDER = "scheduler-0_uid-0_1"
PERIOD_S = 0.5
RENEWAL_S = 2.5


@dataclass
class Election:
    """Notes who is said to be dead."""

    leader: str = HOLDER
    leader_address: str = "10.0.0.1:50052"
    leader_renews: bool = True
    dead: list[str] = field(default_factory=list)

    def note_death(self, holder: str) -> None:
        self.dead.append(holder)


@dataclass
class World:
    """The leader's address, and the API server that knows its pod."""

    answer: ProbeResult = ProbeResult.LISTENS
    later: Iterator[ProbeResult] = field(default_factory=lambda: iter(()))
    pod: PodState | None = PodState.RUNS
    n_lookups: int = 0

    async def ask(self, address: str) -> ProbeResult:
        assert address == "10.0.0.1:50052"
        return next(self.later, self.answer)

    async def look_up(self, name: str, uid: str) -> PodState:
        assert (name, uid) == ("scheduler-0", "uid-0")
        self.n_lookups += 1
        if self.pod is None:
            raise PodsUnavailable("no way there")
        return self.pod


def watching(election: Election, world: World) -> asyncio.Task[None]:
    watch = LeaderWatch(
        election,
        pod_state=world.look_up,
        ask=world.ask,
        period_s=PERIOD_S,
        renewal_s=RENEWAL_S,
    )
    return asyncio.create_task(watch.run())


def test_a_leader_whose_process_has_ended_is_found_dead_within_a_period() -> None:
    async def story() -> None:
        election, world = Election(), World()
        watching(election, world)
        await asyncio.sleep(10.2)
        assert election.dead == []
        world.answer = ProbeResult.REFUSES
        await asyncio.sleep(PERIOD_S + AGAIN_S)
        assert election.dead == [HOLDER]
        assert world.n_lookups == 1  # at the first look
        await asyncio.sleep(10)
        assert election.dead == [HOLDER]

    simulate(story())


def test_one_refusal_is_no_death() -> None:
    async def story() -> None:
        election, world = Election(), World()
        world.later = iter([ProbeResult.LISTENS, ProbeResult.REFUSES])
        watching(election, world)
        await asyncio.sleep(10)
        assert election.dead == []

    simulate(story())


@pytest.mark.parametrize("answer", list(ProbeResult), ids=lambda answer: answer.name)
def test_a_leader_whose_pod_is_gone_when_the_wait_begins_is_dead_whoever_listens(
    answer: ProbeResult,
) -> None:
    async def story() -> None:
        election = Election()
        watching(election, World(answer, pod=PodState.GONE))
        await asyncio.sleep(PERIOD_S)
        assert election.dead == [HOLDER]

    simulate(story())


def test_a_leader_whose_pod_is_not_known_yet_as_running_lives_while_it_listens() -> None:
    async def story() -> None:
        election, world = Election(), World(pod=PodState.IDLE)
        watching(election, world)
        await asyncio.sleep(10)
        assert election.dead == []

    simulate(story())


@pytest.mark.parametrize("answer", [ProbeResult.REFUSES, ProbeResult.NONE])
def test_a_leader_that_was_never_reached_is_dead_when_no_container_runs(
    answer: ProbeResult,
) -> None:
    async def story() -> None:
        election = Election(leader_renews=False)
        watching(election, World(answer, pod=PodState.IDLE))
        await asyncio.sleep(PERIOD_S)
        assert election.dead == [HOLDER]

    simulate(story())


def test_a_leader_that_refuses_from_the_start_is_dead_after_a_renewal_that_did_not_come() -> None:
    async def story() -> None:
        election = Election(leader_renews=False)
        watching(election, World(ProbeResult.REFUSES))
        await asyncio.sleep(RENEWAL_S)
        assert election.dead == []
        await asyncio.sleep(2 * PERIOD_S)
        assert election.dead == [HOLDER]

    simulate(story())


def test_a_leader_behind_a_firewall_that_refuses_lives_while_it_renews() -> None:
    async def story() -> None:
        election, world = Election(leader_renews=False), World(ProbeResult.REFUSES)
        watching(election, world)
        await asyncio.sleep(2)
        election.leader_renews = True
        await asyncio.sleep(60)
        assert election.dead == []
        assert world.n_lookups < 10

    simulate(story())


@pytest.mark.parametrize("state", [*PodState, None], ids=lambda state: state and state.name)
def test_a_leader_that_does_not_answer_is_dead_when_its_pod_has_ended(
    state: PodState | None,
) -> None:
    async def story() -> None:
        election, world = Election(), World()
        watching(election, world)
        await asyncio.sleep(10)
        world.answer, world.pod = ProbeResult.NONE, state
        await asyncio.sleep(10)
        assert election.dead == ([HOLDER] if state in (PodState.GONE, PodState.IDLE) else [])
        assert world.n_lookups > 1

    simulate(story())


def test_a_leader_without_an_address_and_a_lease_without_a_leader_are_left_alone() -> None:
    async def story() -> None:
        election = Election(leader_address="")
        task = watching(election, World(ProbeResult.REFUSES))
        await asyncio.sleep(5)
        election.leader, election.leader_address = "", "10.0.0.1:50052"
        await asyncio.sleep(5)
        assert election.dead == []
        assert not task.done()

    simulate(story())


async def test_ask_tells_who_listens_from_who_refuses() -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    assert await ask(address) is ProbeResult.LISTENS
    server.close()
    await server.wait_closed()
    assert await ask(address) is ProbeResult.REFUSES
    assert await ask("nonsense") is ProbeResult.NONE
