"""Has all ranks of an epoch load and drop adapters, by orders in the stream of plans.

The adapter gate chooses one load at a time (`core/admission/adapter_gate.py`). The load has ended
when all ranks of all stages have reported that they have the adapter, when one of them has reported
a failure, or after a time limit. All ranks must have read the same bytes: their digests are
compared.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from orcinus.v1 import worker_pb2

from services.common.failure_text import failure_text
from services.scheduler.core.admission.adapter_gate import AdapterChange
from services.scheduler.pipeline.membership import Pipeline

LOAD_LIMIT_S = 60.0
"""Seconds in which the ranks must load an adapter."""


class LoadOutcome(NamedTuple):
    """The outcome of one load of an adapter."""

    load_id: int
    digest: str
    """Digest of the adapter; empty if it is not loaded."""
    failure: str
    """The reason why the adapter is not loaded, for clients; empty if it is loaded."""


class AdapterOrders:
    """Orders the ranks of one epoch to load and drop adapters, and waits for the one load that they
    carry out at a time."""

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        write: Callable[[worker_pb2.RunIterationsRequest], Awaitable[None]],
        wake: Callable[[], None],
        limit_s: float = LOAD_LIMIT_S,
    ) -> None:
        """`write` sends a message in the stream of plans. `wake` is called when `take` has
        something to return. `limit_s` is the time limit of a load in seconds."""
        self._pipeline = pipeline
        self._write = write
        self._wake = wake
        self._limit_s = limit_s
        self._load_id = 0  # 0: no load is awaited
        self._expected = ""  # digest that the adapter must have; empty if it is not known
        self._digests: dict[tuple[int, int], str] = {}  # by stage and rank
        self._timer: asyncio.TimerHandle | None = None
        self._ended: list[LoadOutcome] = []

    async def order(self, change: AdapterChange) -> None:
        """Orders the ranks to load or drop adapters, once they have run the iterations that were
        sent before. If `change` loads an adapter, begins to wait for the end of the load.

        Raises:
            PipelineLost: the epoch is over.
        """
        if change.load_id:
            self._load_id, self._expected = change.load_id, change.digest
            self._digests.clear()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(
                self._limit_s, self._fail, f"the workers did not load it in {self._limit_s:g} s"
            )
        message = worker_pb2.RunIterationsRequest(
            pipeline_id=self._pipeline.pipeline_id,
            epoch=self._pipeline.epoch,
            adapter_order=worker_pb2.AdapterOrder(
                load_id=change.load_id,
                name=change.name,
                source=change.source,
                digest=change.digest,
                dropped=change.dropped,
            ),
        )
        await self._write(message)

    def note(self, stage_index: int, report: worker_pb2.AdapterReport) -> None:
        """Notes a rank's report that it has loaded the adapter, or why it has not. Ignores a report
        of a load that has ended."""
        if report.load_id != self._load_id:
            return
        if report.failure:
            self._fail(failure_text(report.failure))
            return
        self._digests[stage_index, report.tp_rank] = report.digest
        found = {*self._digests.values(), *filter(None, (self._expected,))}
        if len(found) > 1:
            self._fail("the workers have read different files")
        elif len(self._digests) == self._pipeline.n_stages * self._pipeline.first.tp_size:
            self._end(LoadOutcome(self._load_id, report.digest, ""))

    def take(self) -> list[LoadOutcome]:
        """Returns the outcomes of the loads that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Cancels the time limit of the load in progress, if there is one."""
        if self._timer is not None:
            self._timer.cancel()

    def _fail(self, failure: str) -> None:
        self._end(LoadOutcome(self._load_id, "", failure))

    def _end(self, outcome: LoadOutcome) -> None:
        self.close()
        self._load_id = 0
        self._ended.append(outcome)
        self._wake()
