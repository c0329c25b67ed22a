"""The progress of a stage's ranks in loading weights, and the description of the loaded stage."""

import asyncio
import json
from collections.abc import Callable

from orcinus.v1 import worker_pb2

OnProgress = Callable[[int, int], None]
"""A function that is called with the number of bytes of weights that all ranks have loaded so far,
and the total number of bytes that they must load."""

OnCheckpoint = Callable[[list[list[str]]], None]
"""A function that is called with the rows of a CheckpointReport. Each row is a pair of texts."""


class Loading:
    """Collects the progress of all ranks in loading their weights, and the description of each rank
    that has finished."""

    def __init__(
        self,
        tp_size: int,
        *,
        on_progress: OnProgress | None = None,
        on_checkpoint: OnCheckpoint | None = None,
    ) -> None:
        self.n_bytes_loaded = 0
        """Number of bytes of weights that all ranks have loaded so far."""
        self.n_bytes = 0
        """Total number of bytes of weights of all ranks."""
        self._tp_size = tp_size
        self._on_progress = on_progress
        self._on_checkpoint = on_checkpoint
        self._progress: dict[int, tuple[int, int]] = {}  # by tp_rank: bytes so far, total
        self._descriptions: dict[int, worker_pb2.DescribeResponse] = {}
        self._is_done = asyncio.Event()

    def note_progress(self, tp_rank: int, payload: bytes) -> None:
        """Records how many bytes a rank has loaded. `payload` is the rank's message
        (`MessageKind.PROGRESS`)."""
        n_done, n_total = (int(number) for number in payload.split())
        self._progress[tp_rank] = (n_done, n_total)
        done, total = (sum(column) for column in zip(*self._progress.values(), strict=True))
        self.n_bytes_loaded, self.n_bytes = done, total
        if self._on_progress is not None:
            self._on_progress(done, total)

    def note_checkpoint(self, payload: bytes) -> None:
        """Passes the report about the checkpoint to `on_checkpoint`. `payload` is a rank's message
        (`MessageKind.CHECKPOINT`)."""
        if self._on_checkpoint is not None:
            self._on_checkpoint(json.loads(payload))

    def note_loaded(self, tp_rank: int, payload: bytes) -> None:
        """Records the description of a rank that has loaded. `payload` is the rank's message
        (`MessageKind.LOADED`)."""
        self._descriptions[tp_rank] = worker_pb2.DescribeResponse.FromString(payload)
        if len(self._descriptions) == self._tp_size:
            self._is_done.set()

    async def wait(self) -> None:
        """Waits until every rank has loaded its weights."""
        await self._is_done.wait()

    def describe(self) -> worker_pb2.DescribeResponse | None:
        """Returns the description of the stage. Returns None until all ranks have loaded.

        The numbers of K/V blocks and of state rows are the smallest among the ranks.
        """
        if not self._is_done.is_set():
            return None
        description = worker_pb2.DescribeResponse()
        description.CopyFrom(self._descriptions[0])
        for field in ("n_kv_blocks", "n_state_rows"):
            least = min(getattr(item, field) for item in self._descriptions.values())
            setattr(description, field, least)
        return description
