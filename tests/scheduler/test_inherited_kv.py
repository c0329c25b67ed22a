"""A new leader restores the keys and values of the leader before: by examples, and with a model of
the memory that checks that every restored block was written."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from orcinus.v1 import worker_pb2
from orcinus.v1.worker_pb2 import KeptBlocks as KeptBlocksMessage
from orcinus.v1.worker_pb2 import StoredKV

from services.scheduler.core.batch import Batch
from services.scheduler.core.memory.prefix_cache import OWN_SECRET
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.inherited_kv import InheritedKV, complete_until
from services.scheduler.pipeline.cache_changes import tell_changes
from services.scheduler.pipeline.membership import Member, Pipeline
from services.worker.rank.kept_blocks import KeptBlocks
from tests.scheduler.core.test_complete_kv import (
    MACHINES,
    LossyDriver,
    Machine,
    core,
    driver_of,
    request_of,
    run_with_losses,
    start_of,
)
from tests.scheduler.core.workload import Arrival, arrivals

SECRET = b"s" * 32
KEPT = KeptBlocksMessage(epoch=5, last_iteration=9, secret=SECRET)


def pipeline_of(*processes: str, epoch: int = 6) -> Pipeline:
    members = [Member(it, worker_pb2.DescribeResponse(process=it)) for it in processes]
    return Pipeline("p", epoch, tuple(members))


def stored(epoch: int = 5, iteration: int = 8, begun: int = 9) -> StoredKV:
    return StoredKV(memory=b"m", epoch=epoch, iteration=iteration, begun_iteration=begun)


def test_all_is_complete_up_to_the_rank_that_is_furthest_behind() -> None:
    assert complete_until([[stored()], [stored(iteration=7, begun=8)]], KEPT) == (5, 7)


@pytest.mark.parametrize(
    "ranks",
    [
        [[stored()], [stored(epoch=4)]],
        [[stored()], [stored(begun=10)]],
        [[stored()], [stored(begun=0)]],
        [[stored()], []],
        [],
    ],
    ids=["another epoch", "further than the first", "another process", "a GPU", "no answer"],
)
def test_nothing_is_complete_in_doubt(ranks: Sequence[Sequence[StoredKV]]) -> None:
    assert complete_until(ranks, KEPT) is None


def test_nothing_is_complete_if_no_blocks_are_known() -> None:
    assert complete_until([[stored()]], KeptBlocksMessage()) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"secret": b"s" * 65},
        {"secret": b"s" * 31},
        {"block_id": [3]},
        {"key": [b"a"]},
        {"iteration": [6, 7, 8]},
        {"block_id": [3, 3]},
        {"key": [b"a", b"a"]},
    ],
    ids=str,
)
def test_nothing_is_restored_from_a_list_that_is_not_well_formed(wrong: dict[str, Any]) -> None:
    columns: dict[str, Any] = {"block_id": [3, 4], "key": [b"a", b"b"], "iteration": [6, 7]}
    columns["secret"] = SECRET
    kept = KeptBlocksMessage(epoch=5, last_iteration=9, **(columns | wrong))
    following = core()
    begun = InheritedKV().begin(pipeline_of("a"), [[stored()]], kept, following.kv_manager)
    assert (begun, len(following.kv_manager.blocks.cache)) == (None, 0)


def test_only_blocks_that_are_complete_on_all_ranks_are_restored() -> None:
    kept = KeptBlocksMessage(epoch=5, last_iteration=9, secret=SECRET)
    kept.MergeFrom(
        KeptBlocksMessage(block_id=[3, 4, 5], key=[b"a", b"b", b"c"], iteration=[6, 7, 8])
    )
    ranks = [[stored(iteration=8)], [stored(iteration=7)]]
    following = core()
    begun = InheritedKV().begin(pipeline_of("a"), ranks, kept, following.kv_manager)
    cache = following.kv_manager.prefix_cache
    assert (begun, [it in cache for it in (3, 4, 5)]) == ((5, 7), [True, True, False])


class Rank:
    """The first rank of a pipeline with one rank, whose iterations all complete."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._kept = KeptBlocks()
        self._n_begun = 0

    def iterate(self, scheduler: Scheduler) -> None:
        batch = scheduler.select()
        assert batch is not None
        plan = worker_pb2.RunIterationsRequest(epoch=self.epoch, iteration=batch.iteration)
        tell_changes(batch.cache_changes, plan)
        self._kept.begin(plan)
        self._n_begun = batch.iteration
        scheduler.apply(batch.iteration, [5] * batch.n_sampled)

    @property
    def stored(self) -> list[list[StoredKV]]:
        return [[stored(self.epoch, self._n_begun, self._n_begun)]]

    @property
    def kept_blocks(self) -> worker_pb2.KeptBlocks:
        kept = self._kept.to_message()
        assert kept is not None
        return kept


def led() -> tuple[Rank, Scheduler]:
    """Returns a rank that has run six iterations of a request with 9 tokens, and their core."""
    rank, scheduler = Rank(5), core()
    scheduler.kv_manager.prefix_cache.record_changes()
    scheduler.submit(request_of(9))
    for _ in range(6):
        rank.iterate(scheduler)
    return rank, scheduler


def test_a_request_goes_on_under_a_new_leader_with_its_full_blocks() -> None:
    rank, _ = led()
    following, inherited = core(), InheritedKV()
    complete = inherited.begin(
        pipeline_of("a"), rank.stored, rank.kept_blocks, following.kv_manager
    )
    assert complete == (5, 6)
    again = request_of(9)
    again.generated_token_ids.extend([5] * 5)
    following.submit(again)
    assert start_of(following) == 12


def test_blocks_of_a_smaller_memory_that_it_does_not_have_are_left_out() -> None:
    rank, _ = led()
    following = core(n_blocks=3)
    assert max(rank.kept_blocks.block_id) < 3
    InheritedKV().begin(pipeline_of("a"), rank.stored, rank.kept_blocks, following.kv_manager)
    assert len(following.kv_manager.blocks.cache) == 3
    smaller = core(n_blocks=2)
    InheritedKV().begin(pipeline_of("a"), rank.stored, rank.kept_blocks, smaller.kv_manager)
    assert len(smaller.kv_manager.blocks.cache) == 2
    assert smaller.kv_manager.n_allocated_blocks == 0


def test_a_core_without_a_prefix_cache_restores_nothing() -> None:
    rank, _ = led()
    following = core(has_prefix_cache=False)
    InheritedKV().begin(pipeline_of("a"), rank.stored, rank.kept_blocks, following.kv_manager)
    following.submit(request_of(9))
    assert start_of(following) == 0


def test_a_leader_asks_the_workers_that_have_not_served_it() -> None:
    inherited = InheritedKV()
    assert inherited.is_wanted(pipeline_of("a", "b"))
    inherited.begin(pipeline_of("a", "b"), [], KeptBlocksMessage(), core().kv_manager)
    assert not inherited.is_wanted(pipeline_of("b", "c"))
    assert inherited.is_wanted(pipeline_of("c", "d"))


def test_a_leader_that_has_its_own_secret_restores_no_digests_of_another_one() -> None:
    rank, _ = led()
    kept = rank.kept_blocks
    kept.secret = SECRET
    own, inherited = core(), InheritedKV()
    inherited.begin(pipeline_of("a"), [], KeptBlocksMessage(), own.kv_manager)
    following = core()
    begun = inherited.begin(pipeline_of("b"), rank.stored, kept, following.kv_manager)
    assert (begun, len(following.kv_manager.blocks.cache)) == (None, 0)
    kept.secret = OWN_SECRET
    begun = inherited.begin(pipeline_of("c"), rank.stored, kept, following.kv_manager)
    assert begun == (5, 6)


def test_the_leader_after_the_next_one_learns_what_was_restored() -> None:
    rank, _ = led()
    second = core()
    InheritedKV().begin(pipeline_of("a"), rank.stored, rank.kept_blocks, second.kv_manager)
    second.kv_manager.prefix_cache.record_changes()
    rank.epoch = 6
    second.submit(request_of(5, name="another"))
    rank.iterate(second)
    third = core()
    InheritedKV().begin(pipeline_of("a"), rank.stored, rank.kept_blocks, third.kv_manager)
    third.submit(request_of(9))
    assert start_of(third) == 8


def test_forgotten_blocks_are_not_kept_while_another_request_uses_them() -> None:
    rank, scheduler = led()
    assert len(rank.kept_blocks.block_id) == 3
    broken = request_of(9, name="s")  # with the same prompt, which fills two blocks
    scheduler.submit(broken)
    batch = scheduler.select()
    assert batch is not None
    [place] = [at for at, span in enumerate(batch.spans) if span.request is broken]
    assert len(batch.spans) > 1
    scheduler.apply(batch.iteration, [5] * batch.n_sampled, broken=[place])
    rank.iterate(scheduler)
    assert len(rank.kept_blocks.block_id) == 1


class LeaderlessDriver(LossyDriver):
    """An engine whose leader is lost now and then. The next leader knows what the first rank
    knows."""

    kept: KeptBlocks
    epoch: int

    def lose(self, data: st.DataObject) -> None:
        """Loses the leader. The ranks have completed some of the batches in flight, and have begun
        some more."""
        n_complete = data.draw(st.integers(0, len(self.in_flight)))
        n_begun = data.draw(st.integers(n_complete, len(self.in_flight)))
        for batch in self.in_flight[:n_complete]:
            self.memory.run(batch, self.token_at)
        for batch in self.in_flight[n_complete:n_begun]:
            self.memory.tear(batch, lambda: data.draw(st.booleans()))
        lost, n_returned = self.scheduler, self.scheduler.n_returned
        for batch in self.in_flight[:n_begun]:
            self.note(batch)
        self.in_flight.clear()
        self.updates += lost.suspend()[1]
        ranks = [[stored(self.epoch, n_returned + n_complete, n_returned + n_begun)]]
        kept = self.kept.to_message() or KeptBlocksMessage()
        self.scheduler = self.new_core()
        inherited = InheritedKV()
        inherited._secret = data.draw(st.sampled_from([OWN_SECRET, SECRET]))
        inherited.begin(pipeline_of(), ranks, kept, self.scheduler.kv_manager)
        self.scheduler.kv_manager.prefix_cache.record_changes()
        self.epoch += 1
        assert self.scheduler.adopt() == []

    def return_oldest(self) -> None:
        self.note(self.in_flight[0])
        super().return_oldest()

    def note(self, batch: Batch) -> None:
        """Tells the first rank what comes with a batch that it begins."""
        plan = worker_pb2.RunIterationsRequest(epoch=self.epoch, iteration=batch.iteration)
        tell_changes(batch.cache_changes, plan)
        self.kept.begin(plan)


@given(requests=arrivals(with_cancellations=True, n_requests=12), data=st.data(), machine=MACHINES)
def test_the_next_leader_reads_only_what_is_complete(
    requests: list[Arrival], data: st.DataObject, machine: Machine
) -> None:
    driver = driver_of(machine, requests, data, LeaderlessDriver)
    driver.kept, driver.epoch = KeptBlocks(), 5
    driver.scheduler.kv_manager.prefix_cache.record_changes()
    run_with_losses(driver, data, depth=machine.pipeline_depth)
