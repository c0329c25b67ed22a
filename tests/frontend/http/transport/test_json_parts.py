"""An answer in parts: each part is written when the one before has been sent."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from starlette.types import Message

from services.common import errors
from services.frontend.http.transport.json_parts import JsonParts


class Parts:
    """Notes in one list what is written, what is sent, and that the end is reached."""

    def __init__(self, *, fails_at: int | None = None) -> None:
        self.notes: list[str] = []
        self._fails_at = fails_at

    async def write(self) -> AsyncGenerator[bytes, None]:
        try:
            for number in range(3):
                if number == self._fails_at:
                    raise errors.PoolFull("no room")
                self.notes.append(f"writes {number}")
                yield b"%d" % number
        finally:
            self.notes.append("ends")

    async def send(self, message: Message) -> None:
        body = message.get("body", b"").decode()
        self.notes.append(f"sends {body or message['type'].rpartition('.')[2]}")


async def never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def test_a_part_is_written_when_the_one_before_is_sent() -> None:
    parts = Parts()
    await JsonParts(parts.write())({}, never, parts.send)
    assert parts.notes == [
        *("writes 0", "sends start", "sends 0"),
        *("writes 1", "sends 1", "writes 2", "sends 2"),
        *("ends", "sends body"),
    ]


async def test_an_error_before_the_first_part_leaves_the_answer_to_others() -> None:
    parts = Parts(fails_at=0)
    with pytest.raises(errors.PoolFull):
        await JsonParts(parts.write())({}, never, parts.send)
    assert parts.notes == ["ends"]


async def test_the_rest_is_not_written_for_a_client_that_has_gone() -> None:
    parts, gone = Parts(), asyncio.Event()

    async def send(message: Message) -> None:
        if message.get("body"):
            gone.set()
            await asyncio.Event().wait()  # the client does not read

    async def receive() -> Message:
        await gone.wait()
        return {"type": "http.disconnect"}

    await JsonParts(parts.write())({}, receive, send)
    assert parts.notes == ["writes 0", "ends"]
