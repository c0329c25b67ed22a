"""The record beside keys and values, which a process may leave half written."""

from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine.kv_record import RECORD_BYTES, KVRecord, Stored

STEPS = st.lists(
    st.tuples(st.sampled_from(["begin", "begun", "complete"]), st.integers(1, 9)),
    min_size=1,
    max_size=12,
)


def take(record: KVRecord, step: tuple[str, int]) -> None:
    match step:
        case "begin", n:
            record.begin(n)
        case "begun", n:
            record.note_begun(record.stored.epoch + n)
        case "complete", n:
            record.note_complete(record.stored.iteration + n)


def read(content: bytes | bytearray) -> Stored:
    return KVRecord(memoryview(bytearray(content))).stored


@given(steps=STEPS, data=st.data())
def test_a_reader_gets_the_last_whole_write_wherever_the_writer_ended(
    steps: list[tuple[str, int]], data: st.DataObject
) -> None:
    memory = bytearray(RECORD_BYTES)
    record = KVRecord(memoryview(memory))
    for step in steps:
        stored, content = record.stored, bytes(memory)
        take(record, step)
        assert read(memory) == record.stored
        changed = [at for at in range(RECORD_BYTES) if content[at] != memory[at]]
        torn = bytearray(memory)
        missing = data.draw(st.sets(st.sampled_from(changed), min_size=1) if changed else st.none())
        for at in missing or ():
            torn[at] = content[at]
        assert read(torn) == stored


def test_new_memory_has_no_content() -> None:
    stored = read(bytes(RECORD_BYTES))
    assert (stored.n_blocks, stored.epoch, stored.iteration) == (0, 0, 0)


def test_a_record_that_is_damaged_in_both_slots_counts_as_new_memory() -> None:
    memory = bytearray(RECORD_BYTES)
    record = KVRecord(memoryview(memory))
    record.begin(4)
    record.note_begun(7)
    assert read(bytes(255 - byte for byte in memory)) == read(bytes(RECORD_BYTES))


def test_memory_keeps_its_name_as_long_as_its_blocks_keep_their_places() -> None:
    record = KVRecord(memoryview(bytearray(RECORD_BYTES)))
    first = record.begin(4)
    record.note_begun(7)
    record.note_complete(3)
    assert record.begin(4) == first._replace(epoch=7, iteration=3)
    other = record.begin(5)
    assert (other.n_blocks, other.epoch, other.iteration) == (5, 0, 0)
    assert other.memory != first.memory
