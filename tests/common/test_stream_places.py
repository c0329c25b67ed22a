import asyncio

import pytest

from services.common.errors import PoolFull
from services.common.stream_places import StreamPlaces


async def test_a_place_is_taken_until_its_task_ends() -> None:
    places = StreamPlaces(2, of="readers")
    is_over = asyncio.Event()

    async def call() -> None:
        places.take()
        await is_over.wait()

    calls = [asyncio.create_task(call()) for _ in range(3)]
    with pytest.raises(PoolFull, match="2 readers"):
        await calls[2]
    assert places.n_taken == 2
    is_over.set()
    await asyncio.gather(*calls[:2])
    await asyncio.sleep(0)
    assert places.n_taken == 0
    await call()
