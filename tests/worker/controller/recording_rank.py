"""A rank that only records the messages that it gets."""

from services.worker.channel import MessageKind


class RecordingRank:
    """The controller's end of a rank that never answers."""

    def __init__(self) -> None:
        self.received: list[tuple[MessageKind, bytes]] = []

    def send(self, kind: MessageKind, payload: bytes) -> None:
        self.received.append((kind, payload))
