"""The frames between a controller and its rank, over a real socket pair."""

import asyncio
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.channel import (
    HEADER,
    MAX_PAYLOAD_BYTES,
    BrokenFrame,
    ChannelClosed,
    ControllerEnd,
    FrameBuffer,
    MessageKind,
    RankEnd,
    encode,
)
from tests.limits import HANG_S

FRAMES = st.lists(
    st.tuples(st.sampled_from(MessageKind), st.binary(max_size=300)), min_size=1, max_size=20
)


@given(frames=FRAMES, sizes=st.lists(st.integers(1, 50), min_size=1))
def test_frames_survive_any_way_of_cutting_the_bytes(
    frames: list[tuple[MessageKind, bytes]], sizes: list[int]
) -> None:
    data = b"".join(encode(kind, payload) for kind, payload in frames)
    received: list[tuple[MessageKind, bytes]] = []
    buffer, n_pieces = FrameBuffer(), 0
    while data:
        size = sizes[n_pieces % len(sizes)]
        buffer.feed(data[:size])
        received += buffer.frames()
        data = data[size:]
        n_pieces += 1
    assert received == frames


async def test_both_ends_understand_each_other_and_notice_the_end() -> None:
    ours, theirs = socket.socketpair()
    received: asyncio.Queue[tuple[MessageKind, bytes]] = asyncio.Queue()
    closed = asyncio.Event()
    _, controller = await asyncio.get_running_loop().create_connection(
        lambda: ControllerEnd(lambda *frame: received.put_nowait(frame), closed.set), sock=ours
    )
    rank = RankEnd(theirs)
    large = bytes(range(256)) * 8192  # more than any socket buffer holds
    controller.send(MessageKind.PLAN, large)
    controller.send(MessageKind.JOIN, b"")
    assert await asyncio.to_thread(rank.receive, HANG_S) == (MessageKind.PLAN, large)
    assert rank.receive(30) == (MessageKind.JOIN, b"")
    await asyncio.to_thread(rank.send, MessageKind.REPORT, large)
    assert await asyncio.wait_for(received.get(), HANG_S) == (MessageKind.REPORT, large)
    assert rank.receive(0.01) is None
    theirs.close()
    await asyncio.wait_for(closed.wait(), HANG_S)


@pytest.mark.parametrize(
    "header",
    [(MessageKind.PLAN, MAX_PAYLOAD_BYTES + 1), (MessageKind.PLAN, 2**32 - 1), (0, 0), (255, 7)],
    ids=str,
)
def test_what_is_no_frame_is_refused_by_its_header(header: tuple[int, int]) -> None:
    buffer = FrameBuffer()
    buffer.feed(HEADER.pack(*header))
    with pytest.raises(BrokenFrame, match=f"kind {header[0]:d} and {header[1]} bytes"):
        buffer.take()


async def test_a_controller_hangs_up_on_a_rank_whose_bytes_are_no_frames() -> None:
    ours, theirs = socket.socketpair()
    loop, closed = asyncio.get_running_loop(), asyncio.Event()
    reported: list[object] = []
    loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
    await loop.create_connection(lambda: ControllerEnd(lambda *_: None, closed.set), sock=ours)
    theirs.send(HEADER.pack(MessageKind.REPORT, 2**32 - 1))
    await asyncio.wait_for(closed.wait(), HANG_S)
    assert [type(error) for error in reported] == [BrokenFrame]
    with theirs, pytest.raises(ChannelClosed):
        RankEnd(theirs).receive(30)


def test_a_rank_notices_that_its_controller_is_gone() -> None:
    ours, theirs = socket.socketpair()
    rank = RankEnd(theirs)
    ours.close()
    with pytest.raises(ChannelClosed):
        rank.receive(30)
    with pytest.raises(ChannelClosed):
        rank.send(MessageKind.REPORT, b"x")
    theirs.close()
