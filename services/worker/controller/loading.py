"""How far the ranks of a stage have come with their weights, and what the stage is when they have
loaded.
"""

import asyncio
from collections.abc import Callable

from orcinus.v1 import worker_pb2

OnProgress = Callable[[int, int], None]
"""Called with the bytes that all ranks have loaded and those they load in all."""


class Loading:
    """The progress of all ranks, and the description of each that has loaded."""

    def __init__(self, tp_size: int, *, on_progress: OnProgress | None = None) -> None:
        self.n_bytes_loaded = 0
        """Bytes of weights in memory, on all ranks."""
        self.n_bytes = 0
        """Bytes of weights that the ranks load in all."""
        self._tp_size = tp_size
        self._on_progress = on_progress
        self._progress: dict[int, tuple[int, int]] = {}  # bytes loaded and in all, by tp_rank
        self._descriptions: dict[int, worker_pb2.DescribeResponse] = {}
        self._is_done = asyncio.Event()

    def note_progress(self, tp_rank: int, payload: bytes) -> None:
        """Takes a rank's progress (`MessageKind.PROGRESS`)."""
        n_done, n_total = (int(number) for number in payload.split())
        self._progress[tp_rank] = (n_done, n_total)
        done, total = (sum(column) for column in zip(*self._progress.values(), strict=True))
        self.n_bytes_loaded, self.n_bytes = done, total
        if self._on_progress is not None:
            self._on_progress(done, total)

    def note_loaded(self, tp_rank: int, payload: bytes) -> None:
        """Takes the description of a rank that has loaded (`MessageKind.LOADED`)."""
        self._descriptions[tp_rank] = worker_pb2.DescribeResponse.FromString(payload)
        if len(self._descriptions) == self._tp_size:
            self._is_done.set()

    async def wait(self) -> None:
        """Waits until every rank has its weights."""
        await self._is_done.wait()

    def describe(self) -> worker_pb2.DescribeResponse | None:
        """Returns the description of the stage, with as many K/V blocks and rows of states as
        every rank has; None until all ranks have loaded."""
        if not self._is_done.is_set():
            return None
        description = worker_pb2.DescribeResponse()
        description.CopyFrom(self._descriptions[0])
        for field in ("n_kv_blocks", "n_state_rows"):
            least = min(getattr(item, field) for item in self._descriptions.values())
            setattr(description, field, least)
        return description
