"""Frames between a controller and its rank."""

from services.worker.channel import HEADER, BrokenFrame, FrameBuffer, MessageKind, encode
from tests.fuzz.coverage.target import Choices, Target


def run(data: bytes) -> None:
    """Feeds bytes to a frame buffer in pieces. The frames that come out must equal the frames that
    were put in."""
    choices = Choices(data)
    buffer = FrameBuffer()
    frames: list[tuple[MessageKind, bytes]] = []
    n_pieces = 1 + choices.number(8)
    rest = data[1:]
    size = len(rest) // n_pieces + 1
    try:
        for at in range(0, len(rest), size):
            buffer.feed(rest[at : at + size])
            frames += buffer.frames()
    except BrokenFrame:
        return
    written = b"".join(encode(kind, payload) for kind, payload in frames)
    assert rest.startswith(written)
    assert len(rest) - len(written) < HEADER.size or buffer.take() is None


TARGET = Target(
    run=run,
    seeds=[
        b"\3" + encode(MessageKind.PLAN, b"plan") + encode(MessageKind.LEAVE, b"7"),
        b"\0" + HEADER.pack(2, 2**32 - 1),
        b"\0" + HEADER.pack(200, 0),
    ],
)
