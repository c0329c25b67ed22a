"""Delivers the reports of a stage to all watchers of the stage.

Most reports come from a rank and are forwarded as bytes, without decoding. The controller adds two
kinds of reports: the stage's heartbeats and its failure.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from orcinus.v1 import worker_pb2

from services.worker.controller.epoch import Epoch

MAX_UNREAD_REPORTS = 4096
"""Largest number of reports that may wait for one watcher."""


class ReportFeed:
    """Passes reports to the watchers of the current epoch. Each watcher has a queue of serialized
    WatchStageResponses."""

    def __init__(self, epoch: Epoch) -> None:
        self._epoch = epoch
        self._watchers: list[asyncio.Queue[bytes | None]] = []  # None ends a watcher's stream
        self._n_expected = 0  # watchers that will come, since their leader is making the stage join
        self._is_watched = asyncio.Event()
        self._is_unwatched = asyncio.Event()
        self._is_unwatched.set()

    def publish(self, report: bytes) -> None:
        """Queues a report for every watcher. Ends the stream of a watcher whose queue is full."""
        for queue in list(self._watchers):
            if queue.qsize() < MAX_UNREAD_REPORTS:
                queue.put_nowait(report)
            else:  # the engine master sees the end of the stream
                queue.put_nowait(None)
                self._remove(queue)

    def publish_heartbeat(self, *, leaves_in_ms: int = 0) -> None:
        """Tells watchers that the stage is alive. If the worker must stop, `leaves_in_ms` is the
        number of milliseconds after which it ends at the latest; otherwise 0."""
        heartbeat = worker_pb2.StageHeartbeat(leaves_in_ms=leaves_in_ms)
        self._publish(worker_pb2.WatchStageResponse(heartbeat=heartbeat))

    def publish_failure(self, reason: str, *, is_by_itself: bool = False) -> None:
        """Tells watchers that the stage has failed and why, so that the epoch cannot go on.
        `is_by_itself` means that a rank failed without being stopped or killed from outside."""
        self._publish_failure(worker_pb2.StageFailure(reason=reason, is_by_itself=is_by_itself))

    def publish_neighbours_loss(self, reason: str) -> None:
        """Tells watchers that the epoch cannot go on because another stage is lost."""
        self._publish_failure(worker_pb2.StageFailure(reason=reason, is_of_neighbour=True))

    @contextlib.contextmanager
    def watch(self, epoch: int) -> Iterator[AsyncIterator[bytes]]:
        """Yields an iterator over the reports that are published inside the `with` block.

        Raises:
            StaleEpoch: `epoch` is not the current epoch. The iterator raises this error when the
                epoch ends.
        """
        self._epoch.check(epoch)
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._watchers.append(queue)
        self._note_watchers()
        try:
            yield self._reports(queue, epoch)
        finally:
            self._remove(queue)

    @contextlib.contextmanager
    def expecting(self) -> Iterator[None]:
        """Makes `until_unwatched` treat the stage as watched inside the `with` block. Use it while
        a watcher is about to arrive."""
        self._n_expected += 1
        self._note_watchers()
        try:
            yield
        finally:
            self._n_expected -= 1
            self._note_watchers()

    async def until_unwatched(self, *, for_s: float) -> None:
        """Waits until there has been no watcher for `for_s` seconds. Returns at once if there is no
        watcher at the time of the call."""
        while self._is_watched.is_set():
            await self._is_unwatched.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(for_s):
                    await self._is_watched.wait()

    def end(self) -> None:
        """Ends the streams of all watchers."""
        for queue in list(self._watchers):
            queue.put_nowait(None)
            self._remove(queue)

    def _remove(self, queue: "asyncio.Queue[bytes | None]") -> None:
        if queue in self._watchers:
            self._watchers.remove(queue)
        self._note_watchers()

    def _note_watchers(self) -> None:
        if self._watchers or self._n_expected:
            self._is_unwatched.clear()
            self._is_watched.set()
        else:
            self._is_watched.clear()
            self._is_unwatched.set()

    def _publish_failure(self, failure: worker_pb2.StageFailure) -> None:
        self._publish(worker_pb2.WatchStageResponse(failure=failure))

    def _publish(self, report: worker_pb2.WatchStageResponse) -> None:
        report.pipeline_id, report.epoch = self._epoch.pipeline_id, self._epoch.number
        self.publish(report.SerializeToString())

    async def _reports(
        self, queue: asyncio.Queue[bytes | None], epoch: int
    ) -> AsyncIterator[bytes]:
        while (report := await queue.get()) is not None:
            yield report
        self._epoch.check(epoch)
