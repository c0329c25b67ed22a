"""Which workers become which stage, and which do not fit: for any workers, and by examples."""

from collections import Counter
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from orcinus.v1 import worker_pb2

from services.common.protocol import PROTOCOL
from services.scheduler.pipeline.fit import differences
from services.scheduler.pipeline.muster import Muster, Offer, Presence, muster, unfit_beside

FREE = worker_pb2.WORKER_STATE_FREE
LOADING = worker_pb2.WORKER_STATE_LOADING
READY = worker_pb2.WORKER_STATE_READY


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker as it is; it tells its kind as a trait, in whatever state it is."""

    state: worker_pb2.WorkerState = READY
    stage: int = 0
    n_stages: int = 2
    kind: str = "a"
    epoch: int = 1
    protocol: int = PROTOCOL
    is_fixed: bool = False
    presence: Presence = Presence.HERE

    @property
    def answer(self) -> worker_pb2.DescribeResponse:
        answer = worker_pb2.DescribeResponse(
            state=self.state, epoch=self.epoch, protocol=self.protocol, is_fixed=self.is_fixed
        )
        if self.kind:
            answer.traits["dtype"] = self.kind
        if self.state != FREE:
            answer.stage_index, answer.n_stages = self.stage, self.n_stages
        if self.state == READY:
            answer.block_size, answer.n_kv_blocks = 16, 100
        return answer


def decide(workers: dict[str, Worker], n_stages: int = 2, **options: Any) -> Muster:
    offers = [Offer(address, it.answer, it.presence) for address, it in workers.items()]
    return muster(offers, n_stages, **options)


def named(*workers: Worker) -> dict[str, Worker]:
    return {f"w{index}": worker for index, worker in enumerate(workers)}


@st.composite
def worker(draw: st.DrawFn, kinds: str = "ab") -> Worker:
    is_fixed = draw(st.booleans())
    n_stages = draw(st.sampled_from([2, 3]))
    return Worker(
        state=draw(st.sampled_from([LOADING, READY] if is_fixed else [FREE, LOADING, READY])),
        stage=draw(st.integers(0, n_stages - 1)),
        n_stages=n_stages,
        kind=draw(st.sampled_from(kinds)),
        epoch=draw(st.integers(0, 3)),
        protocol=draw(st.sampled_from([PROTOCOL, PROTOCOL, PROTOCOL, PROTOCOL - 1])),
        is_fixed=is_fixed,
        presence=draw(st.sampled_from([*[Presence.HERE] * 4, Presence.SILENT, Presence.ENDED])),
    )


WORKERS = st.lists(worker(), max_size=7)
N_STAGES = st.sampled_from([2, 3])


def usable(workers: dict[str, Worker], kind: str, n_stages: int) -> list[Worker]:
    """The workers of a kind that answer and that this scheduler can use."""
    return [
        it
        for it in workers.values()
        if (it.kind, it.protocol, it.presence) == (kind, PROTOCOL, Presence.HERE)
        and (not it.is_fixed or it.n_stages == n_stages)
    ]


def is_whole(workers: dict[str, Worker], kind: str, n_stages: int) -> bool:
    """Whether workers of a kind are ready to be a pipeline."""
    ready = {
        it.stage
        for it in usable(workers, kind, n_stages)
        if it.state == READY and it.n_stages == n_stages
    }
    return len(ready) == n_stages


def is_enough(workers: dict[str, Worker], kind: str, n_stages: int) -> bool:
    """Whether workers of a kind are, or can be made, a pipeline."""
    able = usable(workers, kind, n_stages)
    fixed = {it.stage for it in able if it.is_fixed}
    return len(fixed) + sum(not it.is_fixed for it in able) >= n_stages


@given(WORKERS, N_STAGES)
def test_the_members_are_a_pipeline_whenever_there_is_one(
    drawn: list[Worker], n_stages: int
) -> None:
    workers = named(*drawn)
    found = decide(workers, n_stages)
    if any(is_whole(workers, kind, n_stages) for kind in "ab"):
        members = [workers[address] for address in found.members]
        assert [member.stage for member in members] == list(range(n_stages))
        assert {member.state for member in members} == {READY}
        assert {member.n_stages for member in members} == {n_stages}
        assert {member.protocol for member in members} == {PROTOCOL}
        assert {member.presence for member in members} == {Presence.HERE}
        assert len({member.kind for member in members}) == 1
        assert not found.assignments
    else:
        assert not found.members


@given(WORKERS, N_STAGES)
def test_an_assignment_takes_a_stage_from_nobody(drawn: list[Worker], n_stages: int) -> None:
    workers = named(*drawn)
    found = decide(workers, n_stages)
    for kind in "ab":
        own = {
            name: stage for name, stage in found.assignments.items() if workers[name].kind == kind
        }
        held = {
            it.stage
            for it in workers.values()
            if (it.kind, it.protocol, it.n_stages) == (kind, PROTOCOL, n_stages)
            and it.state != FREE
            and (it.presence is not Presence.ENDED or it.is_fixed)
        }
        assert len(set(own.values())) == len(own)
        assert set(own.values()) <= set(range(n_stages)) - held
    for address in found.assignments:
        assert not workers[address].is_fixed
        assert workers[address].protocol == PROTOCOL
        assert workers[address].presence is Presence.HERE
        if workers[address].state != FREE:
            others = [it for name, it in workers.items() if name != address]
            same = [
                it
                for it in others
                if (it.stage, it.n_stages, it.kind)
                == (workers[address].stage, n_stages, workers[address].kind)
                and it.state != FREE
            ]
            assert same or workers[address].n_stages != n_stages


@given(WORKERS, N_STAGES)
def test_each_worker_that_stays_out_is_named_and_no_other(
    drawn: list[Worker], n_stages: int
) -> None:
    workers = named(*drawn)
    found = decide(workers, n_stages)
    here = {name for name, it in workers.items() if it.presence is Presence.HERE}
    assert found.unfit.keys() <= here
    assert not found.unfit.keys() & set(found.members)
    if found.members:
        kind = workers[found.members[0]].kind
        assert {name for name in here if workers[name].kind != kind} <= found.unfit.keys()
    for name in found.unfit:
        it = workers[name]
        assert it.protocol != PROTOCOL or it.is_fixed or len({one.kind for one in drawn}) == 2
    faulty = {name for name in here if workers[name].protocol != PROTOCOL}
    assert all(found.unfit[name] == f"protocol {PROTOCOL - 1}, not {PROTOCOL}" for name in faulty)


def settle(workers: dict[str, Worker], n_stages: int) -> Muster:
    """What is decided after all orders were followed and all weights were loaded."""
    for _ in range(5):  # recalled, assigned, loaded, and asked once more
        found = decide(workers, n_stages)
        workers = {name: step(it, found, name, n_stages) for name, it in workers.items()}
    return decide(workers, n_stages)


def step(worker: Worker, found: Muster, name: str, n_stages: int) -> Worker:
    """A worker after it was told what it is to be, and whatever it loaded has loaded."""
    if name not in found.assignments:
        return replace(worker, state=READY) if worker.state == LOADING else worker
    if worker.state == FREE:
        return replace(worker, state=LOADING, stage=found.assignments[name], n_stages=n_stages)
    return replace(worker, state=FREE, epoch=0)  # its process has ended and was started again


@given(WORKERS, N_STAGES)
def test_enough_workers_of_one_kind_become_a_pipeline_whatever_else_there_is(
    drawn: list[Worker], n_stages: int
) -> None:
    here = [replace(it, presence=Presence.HERE) for it in drawn]
    workers = named(*here)
    found = settle(workers, n_stages)
    can = [kind for kind in "ab" if is_enough(workers, kind, n_stages)]
    assert bool(found.members) == bool(can)
    assert not found.members or workers[found.members[0]].kind in can


@given(st.permutations([Worker(FREE), Worker(FREE), Worker(FREE, kind="b")]))
def test_whichever_of_three_comes_first_the_two_that_fit_are_assigned_at_once(
    order: list[Worker],
) -> None:
    workers: dict[str, Worker] = {}
    for number, it in enumerate(order):
        workers[f"w{number}"] = it
        found = decide(workers)
        workers = {name: step(one, found, name, 2) for name, one in workers.items()}
    good = {name for name, it in workers.items() if it.kind == "a"}
    assert all(workers[name].state != FREE for name in good), "no load waits for the odd worker's"
    found = settle(workers, 2)
    assert set(found.members) == good
    assert set(found.unfit.values()) == {"dtype b, not a"}


FREE_ONE = Worker(FREE)
ODD = Worker(FREE, kind="b")
STARTING = Worker(LOADING, stage=1, kind="", is_fixed=True)
"""A worker of a fixed stage, which has not told its traits yet."""


def test_free_workers_are_assigned_the_stages_in_order_and_the_rest_are_spares() -> None:
    found = decide(named(FREE_ONE, FREE_ONE, FREE_ONE))
    assert found.assignments == {"w0": 0, "w1": 1}
    assert not found.members
    assert not found.unfit


def test_a_worker_that_was_assigned_more_often_comes_later() -> None:
    found = decide(named(Worker(stage=0), FREE_ONE, FREE_ONE), n_assigned={"w1": 1})
    assert found.assignments == {"w2": 1}


def test_a_stage_that_loads_is_waited_for() -> None:
    found = decide(named(Worker(stage=0), Worker(LOADING, stage=1), FREE_ONE))
    assert (found.members, found.assignments, found.loading) == ((), {}, (1,))


def test_a_worker_that_has_not_told_its_traits_is_waited_for_and_does_not_count_as_unfit() -> None:
    found = decide(named(Worker(FREE, kind=""), FREE_ONE))
    assert (found.assignments, found.missing, found.unfit) == ({"w1": 0}, (0, 1), {})
    found = decide(named(STARTING, Worker(stage=0), FREE_ONE))
    assert (found.assignments, found.loading, found.missing, found.unfit) == ({}, (1,), (), {})
    assert decide(named(STARTING)).loading == (1,)


@pytest.mark.parametrize(
    "unusable",
    [replace(STARTING, protocol=PROTOCOL - 1), replace(STARTING, n_stages=3)],
    ids=["protocol", "stages"],
)
def test_a_worker_that_cannot_be_used_is_not_waited_for_while_it_loads(unusable: Worker) -> None:
    found = decide(named(unusable, Worker(stage=0), FREE_ONE))
    assert (found.assignments, found.loading, found.missing) == ({"w2": 1}, (), (1,))


def test_a_stage_whose_worker_has_just_fallen_silent_is_not_assigned_yet() -> None:
    workers = named(Worker(stage=0), FREE_ONE)
    silent = Worker(stage=1, presence=Presence.SILENT)
    assert decide({**workers, "other": silent}).assignments == {}
    assert decide(workers).assignments == {"w1": 1}


def test_the_stage_of_a_process_that_has_ended_is_assigned_at_once() -> None:
    workers = named(Worker(stage=0), FREE_ONE)
    ended = Worker(stage=1, presence=Presence.ENDED)
    assert decide({**workers, "other": ended}).assignments == {"w1": 1}
    fixed = replace(ended, is_fixed=True)
    assert decide({**workers, "other": fixed}).assignments == {}, "it comes back as the same stage"


def test_an_odd_worker_does_not_take_over_while_another_process_starts_again() -> None:
    ended = Worker(stage=0, n_stages=1, presence=Presence.ENDED)
    assert decide(named(ended, ODD), 1).assignments == {}
    assert decide(named(ended, ODD), 1).unfit == {"w1": "dtype b, not a"}
    assert decide(named(ODD), 1).assignments == {"w0": 0}


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


def test_two_workers_that_do_not_fit_are_both_named_with_what_each_says() -> None:
    found = decide(named(Worker(stage=0, kind="b"), Worker(stage=1)))
    assert found.unfit == {"w0": "dtype b, not a", "w1": "dtype a, not b"}
    assert not found.members
    assert found.missing


def test_workers_that_do_not_fit_each_load_the_first_stage_of_their_own_group() -> None:
    assert decide(named(ODD, FREE_ONE)).assignments == {"w0": 0, "w1": 0}
    odd = Worker(LOADING, stage=0, kind="b")
    assert decide(named(odd, FREE_ONE)).assignments == {"w1": 0}
    found = decide(named(odd, Worker(LOADING, stage=0), FREE_ONE))
    assert (found.assignments, found.unfit) == ({"w2": 1}, {"w0": "dtype b, not a"})


@pytest.mark.parametrize(
    ("workers", "winner"),
    [
        ([ODD, FREE_ONE, FREE_ONE, FREE_ONE, ODD], "a"),
        ([FREE_ONE, FREE_ONE, ODD, ODD], "b"),
        ([Worker(LOADING), FREE_ONE, ODD, ODD, ODD], "a"),
        ([Worker(), Worker(stage=1), *[replace(ODD, state=READY, stage=s) for s in (0, 1)]], "b"),
        ([Worker(), Worker(stage=1), ODD, ODD, ODD], "a"),
    ],
    ids=["larger", "newer", "holds more stages", "newer, both ready", "ready"],
)
def test_which_of_two_groups_with_enough_workers_is_chosen(
    workers: list[Worker], winner: str
) -> None:
    drawn = named(*workers)
    found = decide(drawn)
    chosen = [*found.members, *found.assignments]
    assert chosen
    assert {drawn[address].kind for address in chosen} == {winner}
    assert {drawn[address].kind for address in found.unfit} == set("ab") - {winner}


def test_an_odd_worker_that_comes_back_after_a_restart_changes_nothing() -> None:
    serving = named(Worker(epoch=9), Worker(stage=1, epoch=9))
    for odd in (Worker(kind="b", epoch=12), ODD):
        found = decide({**serving, "odd": odd})
        assert (found.members, found.assignments) == (("w0", "w1"), {})
        assert found.unfit == {"odd": "dtype b, not a"}


def test_workers_of_another_number_of_stages_are_recalled() -> None:
    workers = named(*(Worker(stage=stage, n_stages=3) for stage in range(3)))
    assert len(decide(workers).assignments) == 2
    fixed = {name: replace(it, is_fixed=True) for name, it in workers.items()}
    assert decide(fixed).unfit["w1"] == "stage 1 of 3 by its settings, not of 2"


@pytest.mark.parametrize(
    ("n_workers", "n_pipelines", "assigned"),
    [
        (4, 2, {"w0": 0, "w1": 1, "w2": 0, "w3": 1}),
        (3, 1, {"w0": 0, "w1": 1}),
        (3, 2, {"w0": 0, "w1": 1}),
        (5, 9, {"w0": 0, "w1": 1, "w2": 0, "w3": 1}),
        (4, 1, {"w0": 0, "w1": 1}),
        (1, 2, {"w0": 0}),
    ],
)
def test_free_workers_beyond_the_first_pipeline_load_for_whole_further_ones(
    n_workers: int, n_pipelines: int, assigned: dict[str, int]
) -> None:
    found = decide(named(*[FREE_ONE] * n_workers), n_pipelines=n_pipelines)
    assert found.assignments == assigned


def test_a_further_pipeline_loads_beside_one_that_is_complete() -> None:
    ready = [Worker(stage=0), Worker(stage=1)]
    found = decide(named(*ready, FREE_ONE, FREE_ONE), n_pipelines=2)
    assert found.members == ("w0", "w1")
    assert found.assignments == {"w2": 0, "w3": 1}
    found = decide(named(*ready, FREE_ONE, Worker(LOADING, stage=1)), n_pipelines=2)
    assert found.assignments == {"w2": 0}, "what loads for a further pipeline goes on"


def test_survivors_of_two_pipelines_form_one_and_of_four_form_two() -> None:
    assert decide(named(Worker(epoch=2), Worker(epoch=1))).assignments == {"w1": 1}
    four = named(*(Worker(epoch=epoch) for epoch in (1, 2, 3, 4)))
    assert decide(four, n_pipelines=2).assignments == {"w0": 1, "w1": 1}
    assert decide(four, n_pipelines=1).assignments == {"w0": 1}


def test_no_worker_is_recalled_while_free_ones_or_processes_that_start_again_are_enough() -> None:
    ended = Worker(stage=1, presence=Presence.ENDED)
    assert decide(named(Worker(), Worker(), ended)).assignments == {}
    assert decide(named(Worker(), Worker(), FREE_ONE)).assignments == {"w2": 1}
    four = named(Worker(), Worker(), Worker(), ended)
    assert decide(four, n_pipelines=2).assignments == {"w0": 1}


def test_a_lost_stage_comes_before_a_further_pipeline() -> None:
    workers = named(Worker(stage=1), FREE_ONE, FREE_ONE, FREE_ONE)
    found = decide(workers, n_pipelines=2)
    assert found.assignments == {"w1": 0, "w2": 0, "w3": 1}


def test_beside_a_pipeline_enough_workers_of_another_build_form_one_of_their_own() -> None:
    serving = {(("dtype", "b"),)}
    found = decide(named(Worker(), Worker(stage=1), ODD), serving=serving)
    assert (found.members, found.assignments) == (("w0", "w1"), {})
    assert found.unfit == {}
    found = decide(named(Worker(), ODD), serving=serving)
    assert (found.members, found.unfit) == ((), {"w0": "dtype a, not b"})


def test_beside_a_pipeline_workers_of_another_model_stay_out() -> None:
    serving = {(("dtype", "b"), ("model", "x"))}
    answers = [Worker(stage=stage).answer for stage in (0, 1)]
    for answer in answers:
        answer.traits["model"] = "y"
    offers = [Offer(f"w{index}", answer) for index, answer in enumerate(answers)]
    found = muster(offers, 2, serving=serving)
    assert (found.members, found.assignments, found.missing) == ((), {}, (0, 1))
    assert set(found.unfit.values()) == {"dtype a, not b; model y, not x"}
    assert unfit_beside(offers, serving, 2) == found.unfit
    for answer in answers:
        answer.traits["model"] = "x"
    assert unfit_beside(offers, serving, 2) == {}, "they are enough for a pipeline"
    assert set(unfit_beside(offers[:1], serving, 2).values()) == {"dtype a, not b"}


def test_a_worker_of_a_pipeline_that_drains_keeps_its_stage_and_is_completed_by_others() -> None:
    kept = Offer("kept", Worker(stage=1, epoch=1).answer, is_serving=True)
    spare = Offer("spare", Worker(stage=1, epoch=9).answer)
    assert muster([kept, spare], 2).assignments == {"spare": 0}
    loaded = Offer("spare", Worker(stage=0).answer)
    assert muster([kept, loaded], 2).members == ("spare", "kept")


class World:
    """Workers that come and go, and pipelines that are formed of them. Orders are carried out and
    weights are loaded in any order."""

    def __init__(self, n_stages: int, random: Random) -> None:
        self.formed: list[dict[str, Worker]] = []
        self.n_orders = 0
        self._n_stages = n_stages
        self._random = random
        self._free: dict[str, Worker] = {}
        self._n_assigned: Counter[str] = Counter()
        self._n_joined = 0

    @property
    def n_workers(self) -> int:
        return len(self._free) + sum(map(len, self.formed))

    def join(self) -> None:
        self._free[f"w{self._n_joined}"] = FREE_ONE
        self._n_joined += 1

    def die(self) -> None:
        """One worker ends for good; the other members of its pipeline are in none any more."""
        everyone = [*self._free, *(address for pipeline in self.formed for address in pipeline)]
        if not everyone:
            return
        address = self._random.choice(everyone)
        for pipeline in self.formed:
            if address in pipeline:
                self.formed.remove(pipeline)
                self._free |= pipeline
                break
        del self._free[address]

    def turn(self) -> None:
        """Forms a pipeline, or carries out the assignments. Some of the workers make progress."""
        for address, worker in self._free.items():
            if worker.presence is Presence.ENDED:
                self._free[address] = FREE_ONE
            elif worker.state == LOADING and self._random.random() < 0.5:
                self._free[address] = replace(worker, state=READY)
        n_pipelines = self.n_workers // self._n_stages - len(self.formed)
        if n_pipelines < 1:
            return
        found = decide(
            self._free, self._n_stages, n_pipelines=n_pipelines, n_assigned=self._n_assigned
        )
        if found.members:
            self.formed.append({address: self._free.pop(address) for address in found.members})
            return
        for address, stage in found.assignments.items():
            self.n_orders += 1
            self._n_assigned[address] += 1
            is_free = self._free[address].state == FREE
            self._free[address] = Worker(
                LOADING,
                stage=stage,
                n_stages=self._n_stages,
                presence=Presence.HERE if is_free else Presence.ENDED,
            )


@given(
    n_stages=st.integers(1, 3),
    events=st.lists(st.sampled_from(["join", "join", "die", "turn", "turn"]), max_size=40),
    random=st.randoms(use_true_random=False),
)
def test_whoever_comes_and_goes_there_are_soon_as_many_pipelines_as_workers_allow(
    n_stages: int, events: list[str], random: Random
) -> None:
    world = World(n_stages, random)
    for event in events:
        getattr(world, event)()
    world.n_orders = 0
    for _ in range(30 + 10 * world.n_workers):
        world.turn()
    assert len(world.formed) == world.n_workers // n_stages
    assert world.n_orders <= 2 * world.n_workers, "each is recalled once and assigned once at most"


@pytest.mark.parametrize(
    ("block_size", "n_kv_blocks"), [(0, 8), (4, 0), (4, 2**32 - 1)], ids=["size", "none", "many"]
)
def test_a_worker_whose_memory_cannot_be_accounted_for_stays_out(
    block_size: int, n_kv_blocks: int
) -> None:
    answer = Worker(n_stages=1).answer
    answer.block_size, answer.n_kv_blocks = block_size, n_kv_blocks
    found = muster([Offer("bad", answer), Offer("good", FREE_ONE.answer)], 1)
    assert found.assignments == {"good": 0}
    assert f"{n_kv_blocks} K/V blocks of {block_size} slots" in found.unfit["bad"]


def test_a_worker_that_is_known_by_two_addresses_is_used_once_and_named() -> None:
    answer = Worker(n_stages=1).answer
    answer.process = "one"
    offers = [Offer("first", answer), Offer("second", answer)]
    found = muster(offers, 1, n_pipelines=2)
    assert found.members == ("first",)
    assert found.unfit == {"second": "it is known by another address, too"}
    found = muster(offers[1:], 1, taken=["one"])
    assert not found.members
    assert found.unfit.keys() == {"second"}


@pytest.mark.parametrize("windows", [[5, 0], [0] * 17], ids=["order", "many"])
def test_a_worker_whose_groups_cannot_be_accounted_for_stays_out(windows: list[int]) -> None:
    answer = Worker(n_stages=1).answer
    answer.kv_windows.extend(windows)
    found = muster([Offer("bad", answer)], 1)
    assert not found.members
    assert "the windows of its K/V groups" in found.unfit["bad"]


def test_a_difference_names_every_trait_and_every_value() -> None:
    kinds = {
        "x": (("block_size", "16"), ("dtype", "float32")),
        "y": (("block_size", "32"), ("dtype", "float32")),
        "z": (("block_size", "64"), ("dtype", "bfloat16")),
    }
    assert differences(kinds, ()) == {
        "x": "block_size 16, not 32 or 64; dtype float32, not bfloat16",
        "y": "block_size 32, not 16 or 64; dtype float32, not bfloat16",
        "z": "block_size 64, not 16 or 32; dtype bfloat16, not float32",
    }
    assert differences(kinds, {kinds["x"]}) == {
        "y": "block_size 32, not 16",
        "z": "block_size 64, not 16; dtype bfloat16, not float32",
    }
    assert differences(kinds, {kinds["x"], kinds["y"]}) == {
        "z": "block_size 64, not 16 or 32; dtype bfloat16, not float32"
    }
