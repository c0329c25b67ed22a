"""The watch over the leader: who is plainly dead, and who only does not answer."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from services.scheduler.cluster.leader_watch import AGAIN_S, LeaderWatch, ProbeResult, ask
from services.scheduler.cluster.pod_directory import PodsUnavailable
from tests.simulated_time import simulate

HOLDER = "scheduler-0_uid-0_1"
PERIOD_S = 0.5


@dataclass
class Election:
    """Notes who is said to be dead."""

    leader: str = HOLDER
    leader_address: str = "10.0.0.1:50052"
    dead: list[str] = field(default_factory=list)

    def note_death(self, holder: str) -> None:
        self.dead.append(holder)


@dataclass
class World:
    """The leader's address, and the API server that knows its pod."""

    answer: ProbeResult = ProbeResult.LISTENS
    later: Iterator[ProbeResult] = field(default_factory=lambda: iter(()))
    pod_has_ended: bool | None = False
    n_lookups: int = 0

    async def ask(self, address: str) -> ProbeResult:
        assert address == "10.0.0.1:50052"
        return next(self.later, self.answer)

    async def look_up(self, name: str, uid: str) -> bool:
        assert (name, uid) == ("scheduler-0", "uid-0")
        self.n_lookups += 1
        if self.pod_has_ended is None:
            raise PodsUnavailable("no way there")
        return self.pod_has_ended


def watching(election: Election, world: World) -> asyncio.Task[None]:
    watch = LeaderWatch(election, pod_has_ended=world.look_up, ask=world.ask, period_s=PERIOD_S)
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
        assert world.n_lookups == 0
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


@pytest.mark.parametrize("answer", [ProbeResult.REFUSES, ProbeResult.NONE])
def test_a_leader_that_was_never_reached_is_not_judged(answer: ProbeResult) -> None:
    async def story() -> None:
        election, world = Election(), World(answer, pod_has_ended=True)
        watching(election, world)
        await asyncio.sleep(10)
        election.leader = "scheduler-0_uid-0_2"
        await asyncio.sleep(10)
        assert election.dead == []

    simulate(story())


@pytest.mark.parametrize("ended", [True, False, None], ids=["ended", "runs", "unknown"])
def test_a_leader_that_does_not_answer_is_dead_when_its_pod_has_ended(ended: bool | None) -> None:
    async def story() -> None:
        election, world = Election(), World()
        watching(election, world)
        await asyncio.sleep(10)
        world.answer, world.pod_has_ended = ProbeResult.NONE, ended
        await asyncio.sleep(10)
        assert election.dead == ([HOLDER] if ended else [])
        assert world.n_lookups > 0

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
