"""The loading of all ranks of a stage, and what the stage is then."""

import asyncio

from services.worker.controller.loading import Loading
from tests.fakes import describe_stage
from tests.limits import HANG_S


async def test_progress_of_all_ranks_is_added_up() -> None:
    told: list[tuple[int, int]] = []
    loading = Loading(2, on_progress=lambda n_done, n_total: told.append((n_done, n_total)))
    loading.note_progress(0, b"30 100")
    loading.note_progress(1, b"50 100")
    loading.note_progress(0, b"60 100")
    assert told == [(30, 100), (80, 200), (110, 200)]
    assert (loading.n_bytes_loaded, loading.n_bytes) == (110, 200)


async def test_a_stage_has_the_memory_that_every_rank_has_when_all_have_loaded() -> None:
    loading = Loading(2)
    waiting = asyncio.create_task(loading.wait())
    for tp_rank, n_kv_blocks in enumerate((70, 60)):
        assert loading.describe() is None
        description = describe_stage()
        description.n_kv_blocks, description.n_state_rows = n_kv_blocks, n_kv_blocks // 10
        await asyncio.sleep(0)
        assert not waiting.done()
        loading.note_loaded(tp_rank, description.SerializeToString())
    await asyncio.wait_for(waiting, HANG_S)
    described = loading.describe()
    assert described is not None
    assert (described.model, described.n_kv_blocks, described.n_state_rows) == ("fake", 60, 6)
