"""Real workers, a real scheduler and a real frontend: a worker with another block size comes first,
is named, and stays out."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.system.pods import Pods, pods

pytestmark = [pytest.mark.system, pytest.mark.thorough]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Pods]:
    async with pods(tmp_path) as made:
        await made.start_scheduler(n_stages=2)
        await made.start_frontend()
        yield made


async def unfit(cluster: Pods) -> dict[str, str]:
    """What each worker that does not fit says, by the number of its pod's address."""
    labels = (await cluster.metrics()).labels("orcinus_unfit_worker")
    return {one["worker"].rpartition(":")[0]: one["says"] for one in labels}


async def test_two_good_workers_serve_whoever_came_first_and_the_odd_one_is_named(
    cluster: Pods,
) -> None:
    odd = await cluster.start_worker(11, block_size=32)
    await cluster.until_reason("there is no worker for stage 1")
    await cluster.start_worker(12, block_size=16)
    reason = await cluster.until_reason("block_size 16, not 32", "block_size 32, not 16")
    assert "127.0.0." not in reason
    await cluster.start_worker(13, block_size=16)
    await cluster.until_serving()
    assert list((await unfit(cluster)).values()) == ["block_size 32, not 16"]
    odd.kill()  # it comes back right after the restart
    await odd.wait()
    await cluster.start_worker(11, block_size=32)
    await cluster.until_serving()
