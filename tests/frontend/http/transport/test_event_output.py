"""The output of a stream on a simulated clock: when headers go out, and comments."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from starlette.types import Message
from uvicorn.protocols.http.flow_control import FlowControl

from services.common import errors
from services.frontend.http.transport.chunk_writer import ChunkWriter
from services.frontend.http.transport.event_output import COMMENT, HEADERS_S, EventOutput
from services.frontend.http.transport.event_stream import EventStream, framed
from tests.simulated_time import simulate

COMMENT_S = 15.0
HEAD = "headers"


class Wire(asyncio.Transport):
    """Keeps what is sent, with the times; chunks may be written past the server, too."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[float, bytes | str]] = []

    async def send(self, message: Message) -> None:
        is_head = message["type"] == "http.response.start"
        what = HEAD if is_head else message["body"]
        self.sent.append((asyncio.get_running_loop().time(), what))

    def write(self, data: bytes | bytearray | memoryview) -> None:
        size, chunk = bytes(data).removesuffix(b"\r\n").split(b"\r\n")
        assert int(size, 16) == len(chunk)
        self.sent.append((asyncio.get_running_loop().time(), chunk))

    def output(self, *, has_chunks: bool = False) -> EventOutput:
        chunks = None
        if has_chunks:
            chunks = ChunkWriter(self, FlowControl(self), asyncio.get_running_loop())
        return EventOutput(self.send, [], comment_s=COMMENT_S, chunks=chunks)


@pytest.mark.parametrize("has_chunks", [False, True], ids=["asgi", "chunks"])
def test_headers_go_out_at_once_and_a_comment_after_each_silence(has_chunks: bool) -> None:
    async def main() -> list[tuple[float, bytes | str]]:
        wire = Wire()
        output = wire.output(has_chunks=has_chunks)
        await output.start()
        await asyncio.sleep(40.0)
        await output.write(b"a")
        await asyncio.sleep(14.0)
        await output.write(b"b")
        await asyncio.sleep(16.0)
        await output.end()
        await asyncio.sleep(100.0)  # nothing comes after the end
        return wire.sent

    assert simulate(main()) == [
        (0.0, HEAD),
        (15.0, COMMENT),
        (30.0, COMMENT),
        (40.0, b"a"),
        (54.0, b"b"),
        (69.0, COMMENT),
        (70.0, b""),
    ]


def test_a_comment_is_one_line() -> None:
    """OpenAI's client takes an empty line for an event, once an event had an id."""
    assert COMMENT.startswith(b": ")
    assert COMMENT.count(b"\n") == 1
    assert COMMENT.endswith(b"\n")


def test_events_cost_no_timers() -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()
        n_timers = 0

        def counted(make: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                nonlocal n_timers
                n_timers += 1
                return make(*arguments, **options)

            return call

        loop.call_at = counted(loop.call_at)  # type: ignore[assignment, method-assign]
        output = Wire().output()
        n_timers = 0
        for _ in range(1000):
            await output.write(b"token")
        output.close()
        return n_timers

    assert simulate(main()) == 0


def test_headers_do_not_wait_for_ever_for_acceptance() -> None:
    async def main() -> list[tuple[float, bytes | str]]:
        wire = Wire()
        output = wire.output()
        await asyncio.sleep(20.0)
        output.close()
        return wire.sent

    assert simulate(main()) == [(HEADERS_S, HEAD), (HEADERS_S + COMMENT_S, COMMENT)]


def test_a_comment_that_waits_for_its_reader_comes_before_the_end() -> None:
    async def main() -> list[bytes | str]:
        reads, sent = asyncio.Event(), list[bytes | str]()

        async def send(message: Message) -> None:
            if message.get("body") == COMMENT:
                await reads.wait()
            sent.append(message.get("body", HEAD))

        output = EventOutput(send, [], comment_s=COMMENT_S)
        await output.start()
        await asyncio.sleep(COMMENT_S + 1)
        ending = asyncio.ensure_future(output.end())
        await asyncio.sleep(1.0)
        reads.set()
        await ending
        return sent

    assert simulate(main()) == [HEAD, COMMENT, b""]


def stream_of(
    write: Callable[[EventOutput], Awaitable[None]],
) -> Coroutine[Any, Any, list[tuple[float, bytes | str]]]:
    async def main() -> list[tuple[float, bytes | str]]:
        wire = Wire()
        stream = EventStream(
            write,
            explain=lambda error: framed(error.message.encode()),
            comment_s=COMMENT_S,
        )

        async def receive() -> Message:
            await asyncio.sleep(1000.0)
            return {"type": "http.disconnect"}

        await stream({}, receive, wire.send)
        return wire.sent

    return main()


def test_error_before_acceptance_has_a_status_of_its_own() -> None:
    async def refuse(_: EventOutput) -> None:
        await asyncio.sleep(HEADERS_S - 0.1)
        raise errors.Unavailable("no pipeline")

    with pytest.raises(errors.Unavailable):
        simulate(stream_of(refuse))


def test_error_after_a_long_wait_is_an_event() -> None:
    async def hold(_: EventOutput) -> None:
        await asyncio.sleep(30.0)
        raise errors.Unavailable("no pipeline")

    assert simulate(stream_of(hold)) == [
        (HEADERS_S, HEAD),
        (HEADERS_S + COMMENT_S, COMMENT),
        (30.0, b"data: no pipeline\n\n"),
        (30.0, b""),
    ]


def test_accepted_stream_has_its_headers_before_its_first_event() -> None:
    async def accept(output: EventOutput) -> None:
        await output.start()
        await asyncio.sleep(1.0)
        await output.write(framed(b"token"))

    assert simulate(stream_of(accept)) == [
        (0.0, HEAD),
        (1.0, b"data: token\n\n"),
        (1.0, b""),
    ]
