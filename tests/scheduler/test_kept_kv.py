"""Which ended pipeline an epoch goes on with, by what its stages say that they have."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from orcinus.v1.worker_pb2 import StoredKV

from services.scheduler import kept_kv
from services.scheduler.core.request import Request, RequestId
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.kept_kv import KeptKV, Written
from tests.scheduler.core.workload import build

WRITTEN = Written((b"a", b"b", b"c", b"d"), complete=(5, 8), last_epoch=5)


def core(n_blocks: int = 8) -> Scheduler:
    return build(
        max_batch_size=1,
        n_blocks=n_blocks,
        block_size=4,
        pipeline_depth=1,
        has_prefix_cache=True,
    )


def held(*changes: tuple[int, StoredKV]) -> list[list[StoredKV]]:
    """Returns what two stages of two ranks have: everything, except for changes by rank."""
    ranks = [StoredKV(memory=name, epoch=5, iteration=8) for name in WRITTEN.memories]
    for index, stored in changes:
        ranks[index] = stored
    return [ranks[:2], ranks[2:]]


@pytest.mark.parametrize(
    "iteration", [10, 7], ids=["further", "ended before it had recorded the last iteration"]
)
def test_an_epoch_goes_on_if_all_ranks_have_all_that_has_returned(iteration: int) -> None:
    kept, ended = KeptKV(), core()
    kept.keep(WRITTEN, ended)
    last = (3, StoredKV(memory=b"d", epoch=5, iteration=iteration))
    written, found = kept.begin(7, held(last), core())
    assert found is ended
    assert written == Written(WRITTEN.memories, complete=(5, 8), last_epoch=7)


@pytest.mark.parametrize(
    "stored",
    [
        StoredKV(memory=b"x", epoch=5, iteration=8),
        StoredKV(memory=b"c", epoch=5, iteration=6),
        StoredKV(memory=b"c", epoch=4, iteration=9),
        StoredKV(memory=b"c", epoch=6, iteration=1),
        StoredKV(memory=b"c"),
    ],
    ids=["other memory", "incomplete", "earlier epoch", "written since", "empty"],
)
def test_an_epoch_begins_anew_if_one_rank_is_in_doubt(stored: StoredKV) -> None:
    kept = KeptKV()
    kept.keep(WRITTEN, core())
    written, found = kept.begin(7, held((2, stored)), core())
    assert found is None
    assert (written.complete, written.last_epoch) == ((7, 0), 7)


def test_an_epoch_begins_anew_if_a_stage_has_no_memory_that_lasts() -> None:
    kept = KeptKV()
    kept.keep(WRITTEN, core())
    written, found = kept.begin(7, [held()[0], []], core())
    assert (written.memories, found) == ((), None)
    kept.keep(written, core())
    assert kept.begin(8, [held()[0], []], core())[1] is None


def test_stages_in_another_order_have_other_memories() -> None:
    kept = KeptKV()
    kept.keep(WRITTEN, core())
    assert kept.begin(7, held()[::-1], core())[1] is None


def test_memory_of_another_size_is_of_no_use() -> None:
    kept = KeptKV()
    kept.keep(WRITTEN, core(n_blocks=9))
    assert kept.begin(7, held(), core())[1] is None


def test_what_an_epoch_writes_to_is_forgotten() -> None:
    kept = KeptKV()
    kept.keep(WRITTEN, core())
    foreign = [[StoredKV(memory=b"x", epoch=1, iteration=1)], [held()[1][0]]]
    assert kept.begin(6, foreign, core())[1] is None
    assert kept.begin(7, held(), core())[1] is None


def test_an_epoch_that_returned_nothing_changes_nothing_that_was_complete() -> None:
    kept, first, second = KeptKV(), core(), core()
    kept.keep(WRITTEN, first)
    written, found = kept.begin(7, held(), second)
    assert found is first
    kept.keep(written, second)
    # One rank has begun to write in the epoch 7, whose blocks the core 2 knows, and three have not.
    begun = (0, StoredKV(memory=b"a", epoch=7, iteration=0))
    assert kept.begin(9, held(begun), core())[1] is second


def core_with_entries() -> Scheduler:
    """Returns a core whose prefix cache has the two blocks of a prompt."""
    made = core()
    made.submit(Request(RequestId("r"), list(range(9)), 1))
    batch = made.select()
    assert batch is not None
    made.apply(batch.iteration, [5])
    return made


def test_the_oldest_pipeline_is_forgotten_when_there_are_too_many_entries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, cores = KeptKV(), [core_with_entries() for _ in range(3)]
    n_each = len(cores[0].kv_manager.blocks.cache)
    monkeypatch.setattr(kept_kv, "MAX_ENTRIES", 2 * n_each)
    for number, ended in enumerate(cores):
        kept.keep(Written((bytes([number]),), (5, 8), 5), ended)
    found = [
        kept.begin(9, [[StoredKV(memory=bytes([number]), epoch=5, iteration=8)]], core())[1]
        for number in range(len(cores))
    ]
    assert found == [None, *cores[1:]]


def test_a_memory_that_is_written_is_forgotten_also_if_another_stage_has_none() -> None:
    kept = KeptKV()
    kept.keep(WRITTEN, core())
    kept.begin(7, [held()[0], []], core())
    assert kept.begin(8, held(), core())[1] is None


@given(
    n_returned=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    behind=st.lists(st.integers(-2, 2), min_size=2, max_size=2),
)
def test_ranks_of_a_chain_of_epochs_are_trusted_up_to_what_they_have_completed(
    n_returned: Sequence[int], behind: Sequence[int]
) -> None:
    """Each rank has recorded what has returned and `behind` iterations more, or fewer."""
    kept, epochs, (a, b) = KeptKV(), range(2, 2 + len(n_returned)), behind
    stored = [[StoredKV(memory=b"a")], [StoredKV(memory=b"b")]]
    written = kept.begin(epochs[0], stored, core())[0]
    for epoch, n in zip(epochs, n_returned, strict=True):
        if n:
            written = Written(written.memories, (epoch, n), epoch)
        last_epoch, last = written.complete
        ranks = [
            StoredKV(memory=b"a", epoch=last_epoch - (last + a < 0), iteration=max(last + a, 0)),
            StoredKV(memory=b"b", epoch=last_epoch - (last + b < 0), iteration=max(last + b, 0)),
        ]
        ended = core()
        kept.keep(written, ended)
        written, found = kept.begin(epoch + 1, [[rank] for rank in ranks], core())
        assert (found is ended) == (min(behind) >= -1 and last + min(behind) >= 0)
