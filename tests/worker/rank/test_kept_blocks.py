"""The blocks that a rank records for the next leader, and when the rank reports them."""

from collections.abc import Collection, Mapping

import pytest
from orcinus.v1 import worker_pb2

from services.worker.engine.kv_record import RECORD_BYTES, KVRecord
from services.worker.rank.epoch_member import EpochMember
from services.worker.rank.kept_blocks import KeptBlocks
from services.worker.rank.kv_journal import KVJournal
from tests.worker.rank.test_epoch_member import Peers, Runner

SECRET = b"s" * 32


def plan(
    iteration: int,
    entered: Mapping[int, bytes] | None = None,
    left: Collection[int] = (),
    *,
    epoch: int = 1,
) -> worker_pb2.RunIterationsRequest:
    message = worker_pb2.RunIterationsRequest(
        pipeline_id="p", epoch=epoch, iteration=iteration, row=[0], n_tokens=[1], sample=[True]
    )
    if entered or left:
        message.cache_changes.secret = SECRET
        message.cache_changes.entered_block_id.extend(entered or {})
        message.cache_changes.entered_key.extend((entered or {}).values())
        message.cache_changes.left_block_id.extend(left)
    return message


def entries(kept: worker_pb2.KeptBlocks) -> list[tuple[int, bytes, int]]:
    return list(zip(kept.block_id, kept.key, kept.iteration, strict=True))


def test_blocks_are_kept_with_the_iteration_that_completes_them_until_they_leave() -> None:
    kept = KeptBlocks()
    assert kept.to_message() is None
    kept.begin(plan(1, {3: b"a", 4: b"b"}))
    kept.begin(plan(2, {5: b"c"}, [3]))
    kept.begin(plan(3, {4: b"d"}))
    kept.begin(plan(4))
    told = kept.to_message()
    assert told is not None
    assert (told.epoch, told.last_iteration, told.secret) == (1, 4, SECRET)
    assert entries(told) == [(5, b"c", 2), (4, b"d", 3)]


def test_the_first_plan_of_another_epoch_replaces_everything() -> None:
    kept = KeptBlocks()
    kept.begin(plan(7, {3: b"a"}))
    kept.begin(plan(1, {4: b"b"}, epoch=2))
    told = kept.to_message()
    assert told is not None
    assert (told.epoch, entries(told)) == (2, [(4, b"b", 1)])


def member(
    journal: KVJournal, *, epoch: int, wants: bool = True, stage_index: int = 0, token: int = 7
) -> EpochMember:
    request = worker_pb2.JoinPipelineRequest(
        pipeline_id="p",
        epoch=epoch,
        stage_index=stage_index,
        members=["x"] * (stage_index + 1),
        wants_kept_blocks=wants,
    )
    runner = Runner(token=token)
    return EpochMember(request, runner, Peers(runner.done), journal=journal)


def run(one: EpochMember, message: worker_pb2.RunIterationsRequest) -> None:
    one.announce(message)
    one.start_next()
    one.take_finished()


@pytest.fixture
def record() -> KVRecord:
    made = KVRecord(memoryview(bytearray(RECORD_BYTES)))
    made.begin(8)
    return made


def test_a_rank_says_what_it_has_begun_and_which_blocks_it_knows(record: KVRecord) -> None:
    journal = KVJournal(record)
    first = member(journal, epoch=1)
    [stored] = first.joined.stored_kv
    assert (stored.epoch, stored.begun_iteration) == (0, 0)
    assert not first.joined.HasField("kept_blocks")
    run(first, plan(1, {3: b"a"}))
    run(first, plan(2))
    joined = member(journal, epoch=2).joined
    [stored] = joined.stored_kv
    assert (stored.epoch, stored.iteration, stored.begun_iteration) == (1, 2, 2)
    assert entries(joined.kept_blocks) == [(3, b"a", 1)]
    assert not member(journal, epoch=3, wants=False).joined.HasField("kept_blocks")
    assert not member(journal, epoch=3, stage_index=1).joined.HasField("kept_blocks")


def test_a_rank_does_not_vouch_for_what_failed_or_for_what_another_process_has_begun() -> None:
    memory = bytearray(RECORD_BYTES)
    record = KVRecord(memoryview(memory))
    record.begin(8)
    journal = KVJournal(record)
    first = member(journal, epoch=1)
    run(first, plan(1))
    first.journal.note_failed()
    [stored] = member(journal, epoch=2).joined.stored_kv
    assert (stored.epoch, stored.iteration, stored.begun_iteration) == (1, 1, 0)

    run(member(journal, epoch=2), plan(1, epoch=2))
    restarted = KVJournal(KVRecord(memoryview(memory)))
    [stored] = member(restarted, epoch=3).joined.stored_kv
    assert (stored.epoch, stored.iteration, stored.begun_iteration) == (2, 1, 0)


def test_a_rank_does_not_vouch_for_an_epoch_with_results_that_are_not_finite(
    record: KVRecord,
) -> None:
    journal = KVJournal(record)
    run(member(journal, epoch=1, token=-1), plan(1))
    run(member(journal, epoch=1), plan(2))  # begun before the leader has forgotten the blocks
    [stored] = member(journal, epoch=2).joined.stored_kv
    assert (stored.epoch, stored.iteration, stored.begun_iteration) == (1, 2, 0)

    run(member(journal, epoch=2), plan(1, epoch=2))
    [stored] = member(journal, epoch=3).joined.stored_kv
    assert (stored.epoch, stored.iteration, stored.begun_iteration) == (2, 1, 1)


def test_another_number_of_blocks_makes_what_was_begun_worthless(record: KVRecord) -> None:
    journal = KVJournal(record)
    run(member(journal, epoch=1), plan(1))
    record.begin(9)
    [stored] = member(journal, epoch=2).joined.stored_kv
    assert (stored.epoch, stored.begun_iteration) == (0, 0)


def test_keys_and_values_that_are_new_in_each_epoch_are_not_mentioned() -> None:
    runner = Runner()
    request = worker_pb2.JoinPipelineRequest(epoch=1, members=["x"], wants_kept_blocks=True)
    one = EpochMember(request, runner, Peers(runner.done))
    run(one, plan(1, {3: b"a"}))
    assert one.joined == worker_pb2.JoinPipelineResponse()
