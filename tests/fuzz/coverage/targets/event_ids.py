"""The header with which a client resumes a stream."""

from services.common import errors
from services.frontend.http.openai.event_id import EventIds, StreamPosition
from tests.fuzz.coverage.target import Target

NAME = "0123456789abcdef" * 2


def run(data: bytes) -> None:
    """Reads an id; one that is accepted must be written as it was read."""
    text = data.decode("latin-1")  # as headers are
    try:
        position = StreamPosition.parse(text)
    except errors.InvalidRequest as error:
        str(error).encode()
        return
    assert len(position.request_id) == 32
    written = EventIds(position.request_id, position.answers)
    again = (written.usage() if position.has_usage else written.current()).decode()
    assert StreamPosition.parse(again) == position, (text, again)


TARGET = Target(
    run=run,
    seeds=[f"{NAME}:{marks}".encode() for marks in ("12,7f,-", "3f;usage", "-", "0,00,1f;usage")],
    words=[NAME, ":", ",", "-", "f", ";usage", "9999999999"],
    max_bytes=512,
)
