"""The description of the API: made when it is asked for, and once."""

import asyncio
import threading

from services.frontend.http.protocol.api_description import ApiDescription, Description


async def test_a_description_is_made_once_and_when_it_is_asked_for() -> None:
    proceed = threading.Event()
    made: list[Description] = []

    def make() -> Description:
        assert proceed.wait(30)
        made.append(Description(b"{}", "page"))
        return made[-1]

    description = ApiDescription(make)
    waiting = [asyncio.ensure_future(description.get()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()  # the other clients still wait
    proceed.set()
    assert await asyncio.gather(*waiting[1:]) == made * 2
    assert await description.get() is made[0]
    assert len(made) == 1
