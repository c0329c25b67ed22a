"""Several schedulers, stages that know epochs, and an API server that some or all cannot reach:
whoever leads, an iteration counts only in the newest epoch, and an API server that is away stops
nobody. The elector and the term are real; stages, pipelines and time are simulated."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from services.common.process import first_of
from services.scheduler.cluster.leader_elector import LeaderElector
from services.scheduler.cluster.leadership import LeadershipLost
from services.scheduler.cluster.term import ElectedTerm
from tests.memory_lease import GOOD, HUNG, REFUSED, Lease, MemoryLeaseStore
from tests.simulated_time import StoppableProcess, simulate

LEASE_S, RETRY_S = 8.0, 2.0
HOP_S = 0.05
"""Seconds for any way between a scheduler and a stage, or between stages."""
RESTART_S = 1.0


class Refused(Exception):
    """Raised by a stage that is in another epoch, or cannot be reached."""


@dataclass
class Stage:
    """A stage as the fence sees it."""

    epoch: int = 0

    def join(self, epoch: int) -> None:
        if epoch <= self.epoch:
            raise Refused
        self.epoch = epoch

    def check(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise Refused


@dataclass
class Iteration:
    """An iteration that came through all stages."""

    leader: str
    epoch: int
    at_s: float


@dataclass
class Site:
    """One lease, two stages, the processes of some pods, and what they have done."""

    lease: Lease = field(default_factory=Lease)
    stages: tuple[Stage, Stage] = field(default_factory=lambda: (Stage(), Stage()))
    pods: list["Pod"] = field(default_factory=list)
    counted: list[Iteration] = field(default_factory=list)
    deposed: set[str] = field(default_factory=set)
    """Leaders after whose iterations another's have counted."""
    n_delivered: int = 0
    """Tokens of the one request that its client has."""
    errors: list[BaseException] = field(default_factory=list)

    def add_pod(self, rate: float = 1.0) -> "Pod":
        self.pods.append(Pod(self, f"pod-{len(self.pods)}", rate))
        return self.pods[-1]

    @property
    def leaders(self) -> list[str]:
        return [
            pod.elector.identity
            for pod in self.pods
            if pod.elector.is_leader and not pod.task.done()
        ]

    def count(self, leader: str, epoch: int) -> None:
        """Notes an iteration: epochs grow, and no leader comes back after another."""
        assert epoch >= max((item.epoch for item in self.counted[-1:]), default=0)
        assert leader not in self.deposed
        self.deposed |= {item.leader for item in self.counted[-1:]} - {leader}
        self.counted.append(Iteration(leader, epoch, asyncio.get_running_loop().time()))

    def deliver(self, position: int) -> None:
        """Gives a token to the client, which drops what it has and must not miss any."""
        assert position <= self.n_delivered
        self.n_delivered = max(self.n_delivered, position + 1)


class Pod:
    """A place where one scheduler's process runs after the other."""

    def __init__(self, site: Site, name: str, rate: float) -> None:
        self.fate = GOOD
        """The fate that calls to the API server meet at the moment."""
        self.reaches_stages = True
        self._site = site
        self._name = name
        self._rate = rate
        self._n_starts = 0
        self.start()

    def start(self) -> None:
        """Starts a process, which knows nothing of the one before."""
        loop = asyncio.get_running_loop()
        self._n_starts += 1
        self.elector = LeaderElector(
            MemoryLeaseStore(self._site.lease, iter(lambda: self.fate, None)),
            identity=f"{self._name}_uid_{self._n_starts}",
            predecessors=f"{self._name}_uid_",
            lease_duration_s=LEASE_S,
            retry_period_s=RETRY_S,
            clock=lambda: loop.time() * self._rate,
        )
        self.process = StoppableProcess()
        self._is_stopping = False
        self.task = asyncio.create_task(self._live())
        self.task.add_done_callback(self._ended)

    def kill(self) -> None:
        """Ends the process on the spot."""
        self.process.go_on()
        self.task.cancel()

    def end(self) -> None:
        """Tells the process to stop: a leader hands over, a candidate ends."""
        if self.elector.is_leader:
            self._is_stopping = True
            self._ending = asyncio.create_task(self.process.run(self.elector.release()))
        else:
            self.kill()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Starts the next process, as kubelet does."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._site.errors.append(error)
        asyncio.get_running_loop().call_later(RESTART_S, self.start)

    async def _live(self) -> None:
        """Waits for its turn, leads and steps down, as `services.scheduler` does."""
        run = self.process.run
        term = ElectedTerm(await run(self.elector.acquire()), self.elector)
        with contextlib.suppress(LeadershipLost):
            await first_of(run(self._lead(term)), run(self._hold()))
        assert not self.elector.is_leader

    async def _hold(self) -> None:
        await self.elector.hold()
        await asyncio.Event().wait()

    async def _lead(self, term: ElectedTerm) -> None:
        while True:
            try:
                await self._hop()
                seen = max(stage.epoch for stage in self._site.stages)
                await self._serve(await term.next_epoch(seen))
            except Refused:
                if self._is_stopping:
                    return
                await asyncio.sleep(0.2)

    async def _serve(self, epoch: int) -> None:
        for stage in self._site.stages:
            await self._hop()
            stage.join(epoch)
        position = self._site.n_delivered  # the client says what it has
        while True:
            for stage in self._site.stages:
                await self._hop()
                stage.check(epoch)
            self._site.count(self.elector.identity, epoch)
            await self._hop()
            self._site.deliver(position)
            position += 1

    async def _hop(self) -> None:
        await asyncio.sleep(HOP_S)
        if not self.reaches_stages:
            raise Refused


def test_an_api_server_that_is_away_stops_no_iteration_and_no_new_epoch() -> None:
    async def story() -> None:
        site = Site()
        pods = [site.add_pod(), site.add_pod()]
        await asyncio.sleep(20)
        for pod in pods:
            pod.fate = HUNG
        for _ in range(10):
            await asyncio.sleep(30)
            site.stages[0].epoch = 0  # it was restarted
        for pod in pods:
            pod.fate = GOOD
        await asyncio.sleep(60)
        times = [iteration.at_s for iteration in site.counted]
        assert max(later - at for at, later in pairwise(times)) < 1.0
        assert len({iteration.leader for iteration in site.counted}) == 1
        assert len({iteration.epoch for iteration in site.counted}) == 11
        assert not site.errors

    simulate(story())


def test_a_leader_that_alone_is_cut_from_the_api_server_yields_when_the_next_has_the_stages() -> (
    None
):
    async def story() -> None:
        site = Site()
        first = site.add_pod()
        await asyncio.sleep(5)
        site.add_pod()
        await asyncio.sleep(5)
        elector, first.fate = first.elector, REFUSED
        cut_at = asyncio.get_running_loop().time()
        await asyncio.sleep(60)
        assert not elector.is_leader
        assert site.leaders == ["pod-1_uid_1"]
        change = next(item for item in site.counted if item.leader == "pod-1_uid_1")
        before = [item for item in site.counted if item.leader != "pod-1_uid_1"]
        assert before[-1].at_s < change.at_s
        assert change.at_s - before[-1].at_s < 1.0
        assert cut_at + LEASE_S - RETRY_S < change.at_s < cut_at + LEASE_S + RETRY_S
        assert not site.errors

    simulate(story())


def test_a_leader_whose_process_is_killed_is_replaced_when_its_container_runs_again() -> None:
    async def story() -> None:
        site = Site()
        pods = [site.add_pod(), site.add_pod()]
        await asyncio.sleep(20)
        leader = next(pod for pod in pods if pod.elector.is_leader)
        leader.kill()
        killed_at = asyncio.get_running_loop().time()
        await asyncio.sleep(20)
        first = next(item for item in site.counted if item.at_s > killed_at + 2 * HOP_S)
        assert first.at_s - killed_at < RESTART_S + 1.0
        assert not site.errors

    simulate(story())


def test_a_leader_that_is_told_to_stop_serves_until_the_next_has_the_stages() -> None:
    async def story() -> None:
        site = Site()
        pods = [site.add_pod(), site.add_pod()]
        await asyncio.sleep(20)
        leader = next(pod for pod in pods if pod.elector.is_leader)
        identity = leader.elector.identity
        told_at = asyncio.get_running_loop().time()
        leader.end()
        await asyncio.sleep(20)
        others = [item.at_s for item in site.counted if item.leader != identity]
        its = [item.at_s for item in site.counted if item.leader == identity]
        assert told_at < its[-1] < others[0] < told_at + RETRY_S + 1.0
        assert others[0] - its[-1] < 10 * HOP_S
        assert not site.errors

    simulate(story())


@dataclass(frozen=True)
class Event:
    """One thing that goes wrong, and is right again some time later."""

    after_s: float
    what: str
    pod: int
    for_s: float

    async def happen(self, site: Site) -> None:
        pod = site.pods[self.pod]
        process = pod.process
        EVENTS[self.what](site, pod)
        await asyncio.sleep(self.for_s)
        process.go_on()
        pod.reaches_stages = True
        for each in site.pods:
            each.fate = GOOD


def no_api_server(site: Site, _: Pod) -> None:
    for pod in site.pods:
        pod.fate = REFUSED


EVENTS: dict[str, Callable[[Site, Pod], object]] = {
    "kill": lambda _, pod: pod.kill(),
    "stop": lambda _, pod: pod.process.stop(),
    "end": lambda _, pod: pod.end(),
    "cut from the stages": lambda _, pod: setattr(pod, "reaches_stages", False),
    "cut from the API server": lambda _, pod: setattr(pod, "fate", HUNG),
    "no API server": no_api_server,
    "no lease": lambda site, _: site.lease.delete(),
    "restart of a stage": lambda site, _: setattr(site.stages[0], "epoch", 0),
}
events = st.builds(
    Event, st.floats(0, 20), st.sampled_from(list(EVENTS)), st.integers(0, 1), st.floats(0, 40)
)
CALM_S = 60.0


@given(
    rates=st.tuples(st.floats(0.9, 1.1), st.floats(0.9, 1.1)),
    events=st.lists(events, min_size=1, max_size=8),
)
@example(rates=(1.0, 1.0), events=[Event(0.0, "stop", 0, 9.0), Event(9.0, "no lease", 0, 0.0)])
def test_whatever_goes_wrong_iterations_count_in_one_epoch_at_a_time_and_tokens_come_once(
    rates: tuple[float, float], events: list[Event]
) -> None:
    async def story() -> None:
        site = Site()
        for rate in rates:
            site.add_pod(rate)
        await asyncio.sleep(10)
        happening = []
        for event in events:
            await asyncio.sleep(event.after_s)
            happening.append(asyncio.create_task(event.happen(site)))
        await asyncio.gather(*happening)
        await asyncio.sleep(CALM_S)
        assert not site.errors
        assert len(site.leaders) == 1
        assert site.counted[-1].leader == site.leaders[0]
        assert site.counted[-1].at_s > asyncio.get_running_loop().time() - 1.0

    simulate(story())
