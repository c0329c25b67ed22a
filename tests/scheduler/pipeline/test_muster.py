"""Who becomes which stage: for any workers, and by examples."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from orcinus.v1 import worker_pb2

from services.common.protocol import PROTOCOL
from services.scheduler.pipeline.muster import Muster, muster

FREE = worker_pb2.WORKER_STATE_FREE
LOADING = worker_pb2.WORKER_STATE_LOADING
READY = worker_pb2.WORKER_STATE_READY


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker as it is; a build shows only when it has loaded."""

    state: worker_pb2.WorkerState = READY
    stage: int = 0
    n_stages: int = 2
    build: str = "a"
    epoch: int = 1
    protocol: int = PROTOCOL
    is_fixed: bool = False

    @property
    def answer(self) -> worker_pb2.DescribeResponse:
        answer = worker_pb2.DescribeResponse(
            state=self.state, epoch=self.epoch, protocol=self.protocol, is_fixed=self.is_fixed
        )
        if self.state != FREE:
            answer.stage_index, answer.n_stages = self.stage, self.n_stages
        if self.state == READY:
            answer.fingerprint = self.build
        return answer


def decide(workers: dict[str, Worker], n_stages: int = 2, **options: object) -> Muster:
    answers = {address: worker.answer for address, worker in workers.items()}
    return muster(answers, n_stages, **options)  # type: ignore[arg-type]


def named(*workers: Worker) -> dict[str, Worker]:
    return {f"w{index}": worker for index, worker in enumerate(workers)}


@st.composite
def worker(draw: st.DrawFn, builds: str = "ab") -> Worker:
    is_fixed = draw(st.booleans())
    n_stages = draw(st.sampled_from([2, 3]))
    return Worker(
        state=draw(st.sampled_from([LOADING, READY] if is_fixed else [FREE, LOADING, READY])),
        stage=draw(st.integers(0, n_stages - 1)),
        n_stages=n_stages,
        build=draw(st.sampled_from(builds)),
        epoch=draw(st.integers(0, 3)),
        protocol=draw(st.sampled_from([PROTOCOL, PROTOCOL, PROTOCOL, PROTOCOL - 1])),
        is_fixed=is_fixed,
    )


def is_whole(workers: dict[str, Worker], build: str, n_stages: int) -> bool:
    """Whether workers of a build are ready to be a pipeline."""
    ready = {
        it.stage
        for it in workers.values()
        if (it.state, it.build, it.n_stages, it.protocol) == (READY, build, n_stages, PROTOCOL)
    }
    return len(ready) == n_stages


@given(st.lists(worker(), max_size=7), st.sampled_from([2, 3]), st.sets(st.integers(0, 2)))
def test_the_members_are_a_pipeline_whenever_there_is_one(
    drawn: list[Worker], n_stages: int, claimed: set[int]
) -> None:
    workers = named(*drawn)
    found = decide(workers, n_stages, claimed=claimed)
    if any(is_whole(workers, build, n_stages) for build in "ab"):
        members = [workers[address] for address in found.members]
        assert [member.stage for member in members] == list(range(n_stages))
        assert {member.state for member in members} == {READY}
        assert {member.n_stages for member in members} == {n_stages}
        assert {member.protocol for member in members} == {PROTOCOL}
        assert len({member.build for member in members}) == 1
        assert not found.assignments
    else:
        assert not found.members or found.missing


@given(st.lists(worker(), max_size=7), st.sampled_from([2, 3]), st.sets(st.integers(0, 2)))
def test_an_assignment_takes_a_stage_from_nobody(
    drawn: list[Worker], n_stages: int, claimed: set[int]
) -> None:
    workers = named(*drawn)
    found = decide(workers, n_stages, claimed=claimed)
    stages = list(found.assignments.values())
    assert len(set(stages)) == len(stages)
    assert set(stages) <= set(range(n_stages)) - claimed
    assert set(stages) <= set(found.missing)
    for address in found.assignments:
        assert not workers[address].is_fixed
        assert workers[address].protocol == PROTOCOL
        if workers[address].state != FREE:
            others = [it for name, it in workers.items() if name != address]
            same = [
                it
                for it in others
                if (it.stage, it.n_stages) == (workers[address].stage, n_stages)
                and it.state != FREE
            ]
            assert same or workers[address].n_stages != n_stages


@given(st.lists(worker(builds="a"), max_size=7), st.sampled_from([2, 3]))
def test_workers_of_one_build_come_together_if_they_can(drawn: list[Worker], n_stages: int) -> None:
    workers = named(*drawn)
    ours = [it for it in drawn if it.protocol == PROTOCOL]
    fixed = {it.stage for it in ours if it.is_fixed and it.n_stages == n_stages}
    can = len(fixed) + sum(not it.is_fixed for it in ours) >= n_stages
    for _ in range(4):  # recalled, assigned, loaded, and asked once more
        found = decide(workers, n_stages)
        workers = {name: step(it, found, name, n_stages) for name, it in workers.items()}
    found = decide(workers, n_stages)
    assert (len(found.members) == n_stages and not found.missing) == can


def step(worker: Worker, found: Muster, name: str, n_stages: int) -> Worker:
    """A worker after it was told what it is to be, and whatever it loaded has loaded."""
    if name not in found.assignments:
        return replace(worker, state=READY) if worker.state == LOADING else worker
    if worker.state == FREE:
        return replace(worker, state=LOADING, stage=found.assignments[name], n_stages=n_stages)
    return replace(worker, state=FREE, epoch=0)  # its process has ended and was started again


FREE_ONE = Worker(FREE)


def test_free_workers_are_assigned_the_stages_in_order_and_the_rest_are_spares() -> None:
    found = decide(named(FREE_ONE, FREE_ONE, FREE_ONE))
    assert found.assignments == {"w0": 0, "w1": 1}
    assert not found.members


def test_a_worker_that_was_assigned_more_often_comes_later() -> None:
    found = decide(named(Worker(stage=0), FREE_ONE, FREE_ONE), n_assigned={"w1": 1})
    assert found.assignments == {"w2": 1}


def test_a_stage_that_loads_is_waited_for() -> None:
    found = decide(named(Worker(stage=0), Worker(LOADING, stage=1), FREE_ONE))
    assert (found.members, found.assignments, found.loading) == ((), {}, (1,))


def test_a_stage_whose_worker_has_just_fallen_silent_is_not_assigned_yet() -> None:
    workers = named(Worker(stage=0), FREE_ONE)
    assert decide(workers, claimed={1}).assignments == {}
    assert decide(workers).assignments == {"w1": 1}


@pytest.mark.parametrize(
    ("holders", "winner"),
    [
        ((Worker(epoch=7), Worker(epoch=3)), "w0"),
        ((Worker(epoch=3), Worker(epoch=7)), "w1"),
        ((Worker(), Worker()), "w1"),
        ((Worker(), Worker(LOADING, epoch=9)), "w0"),
    ],
    ids=["newest epoch", "newest epoch, newer pod", "newer pod", "ready"],
)
def test_of_two_that_hold_a_stage_one_is_a_spare(
    holders: tuple[Worker, Worker], winner: str
) -> None:
    found = decide({**named(*holders), "other": Worker(stage=1)})
    assert found.members == (winner, "other")


def test_one_that_holds_a_stage_twice_is_recalled_when_no_other_is_free() -> None:
    assert decide(named(Worker(epoch=2), Worker(epoch=1))).assignments == {"w1": 1}
    assert decide(named(Worker(epoch=2), Worker(epoch=1), FREE_ONE)).assignments == {"w2": 1}
    assert decide(named(Worker(is_fixed=True), Worker(is_fixed=True))).assignments == {}


def test_workers_of_two_builds_are_not_recalled_for_one_another() -> None:
    found = decide(named(Worker(stage=0), Worker(stage=1, build="b")))
    assert not found.assignments
    assert set(found.members) == {"w0", "w1"}, "so that the caller can say how they differ"
    assert found.missing


def test_workers_of_another_number_of_stages_are_recalled() -> None:
    workers = named(*(Worker(stage=stage, n_stages=3) for stage in range(3)))
    assert len(decide(workers).assignments) == 2
