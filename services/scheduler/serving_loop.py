"""The serving loop: select a batch, run one iteration, apply its tokens (Orca, Algorithm 1).

The loop keeps as many batches in flight as the scheduler allows, and sleeps until a result comes or
a request arrives. All calls into the scheduler are made from this event loop, so nothing needs a
lock.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import compress

from orcinus.v1 import worker_pb2

from services.scheduler.core.batch import Batch, Update
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.engine import Engine
from services.scheduler.observing.iteration_observer import IterationObserver
from services.scheduler.observing.request_observer import RequestObserver
from services.scheduler.pipeline.adapter_changes import (
    NO_ADAPTER_CHANGES,
    AdapterChanges,
    NoAdapterChanges,
)
from services.scheduler.pipeline.grammar_preparation import (
    NO_GRAMMAR_PREPARATION,
    GrammarPreparation,
    NoGrammarPreparation,
)
from services.scheduler.pipeline.span_logprobs import logprobs_of


class ServingLoop:
    """Selects batches, sends them to the engine, and applies their results, in one epoch."""

    def __init__(
        self,
        scheduler: Scheduler,
        engine: Engine,
        *,
        deliver: Callable[[list[Update]], None],
        iterations: IterationObserver,
        requests: RequestObserver,
        has_news: asyncio.Event,
        grammars: GrammarPreparation | NoGrammarPreparation = NO_GRAMMAR_PREPARATION,
        adapters: AdapterChanges | NoAdapterChanges = NO_ADAPTER_CHANGES,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._engine = engine
        self._deliver = deliver
        self._iterations = iterations
        self._requests = requests
        self._has_news = has_news
        self._grammars = grammars
        self._adapters = adapters
        self._now = now
        self._is_draining = False
        self.max_sequence_len = scheduler.kv_manager.max_sequence_len
        """Length of the longest sequence that the pipeline could run, in tokens."""
        scheduler.pool.wake = self._wake

    def runs(self, request: Request) -> bool:
        """Returns whether the pipeline has admitted a request that has not ended."""
        return request in self._scheduler.pool.running

    def submit(self, request: Request) -> None:
        """Puts a request into the pool. The next batch may contain it. `Scheduler.submit` describes
        the errors."""
        self._scheduler.submit(request)

    def cancel(self, request: Request) -> None:
        """Cancels a request. Its K/V memory is freed at once or, if the request is in flight, when
        the iterations that contain it have returned."""
        self._deliver(self._scheduler.cancel(request))
        self._has_news.set()

    def give_up(self, request: Request, message: str) -> None:
        """Ends a waiting request of an earlier epoch that this epoch cannot serve, with `message`
        as the reason."""
        self._deliver(self._scheduler.give_up(request, message))

    def adopt(self) -> None:
        """Takes over the requests that the pool still has from earlier epochs."""
        self._deliver(self._scheduler.adopt())

    def drain(self) -> None:
        """Makes `run` return as soon as no request is in the pool and no batch is in flight."""
        self._is_draining = True
        self._has_news.set()

    def leave(self, *, is_last: bool = False) -> None:
        """Makes `run` return as soon as this pipeline runs no request and no waiting request needs
        it. `Scheduler.drain` describes which requests move, and what `is_last` means."""
        self._scheduler.drain(is_last=is_last)
        self._has_news.set()

    async def run(self) -> None:
        """Serves until `drain` or `leave` has been called and its condition holds.

        Raises:
            PipelineLost: the epoch is over. Unfinished requests are still in the pool.
        """
        results: Sequence[worker_pb2.IterationResult] = ()
        while not (self._scheduler.has_left or (self._is_draining and self._is_idle)):
            if not results:
                await self._send_batches()
            await self._has_news.wait()
            self._has_news.clear()
            for result in (results := self._engine.take_results()):
                updates = self._scheduler.apply(
                    result.iteration,
                    result.token_ids,
                    logprobs_of(result),
                    cut=result.cut,
                    broken=result.broken_spans,
                )
                self._deliver(updates)
                self._iterations.returned(result.iteration, updates, self._scheduler)
                # Batches are sent before the next result is applied. If two batches have returned
                # and both results were applied first, the selection might put all their requests
                # into one batch, and half the pipeline would be idle.
                await self._send_batches()

    @property
    def _is_idle(self) -> bool:
        return len(self._scheduler.pool) == 0 and self._scheduler.n_in_flight == 0

    def _wake(self) -> None:
        """Makes the pipeline select again if it may send a batch, or has to prepare something."""
        core = self._scheduler
        if core.n_in_flight < core.pipeline_depth or core.pool.gates.is_needed:
            self._has_news.set()

    def _select(self) -> Batch | None:
        batch = self._scheduler.select()
        for request in self._scheduler.take_preempted():
            self._requests.preempted(request)
        return batch

    def _prepare_grammars(self) -> None:
        if (prepared := self._grammars.take()) is not None:
            self._deliver(self._scheduler.note_grammar(*prepared))
        if (due := self._scheduler.next_grammar()) is not None:
            self._grammars.begin(due)

    async def _send_batches(self) -> None:
        self._prepare_grammars()
        await self._adapters.step(self.give_up)
        if expired := self._scheduler.expire(self._now()):
            self._deliver(expired)
        while (batch := self._select()) is not None:
            for request in compress(batch.columns.requests, batch.columns.is_admission):
                self._requests.admitted(request)
            self._iterations.sent(batch, self._scheduler)
            await self._engine.run(batch)
