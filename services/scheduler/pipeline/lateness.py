"""Lateness: detects a stage that is silent for too long, and an iteration that does not return.

Where other pipelines serve, a late iteration is suspected sooner: its requests can go on elsewhere,
and run again what they lose, so that a suspicion that turns out wrong costs little. A request is
moved by a suspicion only once. If its next pipeline is late, too, the request may be the cause, and
the usual limit decides.

Time is counted only while this process runs. While the process is stopped or starved, it reads no
reports, and the stages that sent them are not silent.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from services.common.iteration_limit import IterationLimit, IterationSize
from services.scheduler.core.batch import Batch

LOOK_S = 0.5
"""Largest number of seconds between two checks."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """An iteration in flight."""

    batch: Batch
    at: float  # when it was sent, by the event loop's clock
    at_s: float  # when it was sent, in seconds for which this process has run

    def work(self) -> IterationSize:
        columns = self.batch.columns
        return IterationSize.of(columns.start_positions, columns.n_tokens)


@dataclass(frozen=True, slots=True)
class Late:
    """A stage or an iteration that is late."""

    reason: str
    stage_index: int | None
    """The stage that is silent; None if an iteration is late."""
    is_suspicion: bool = False
    """Whether the pipeline is given up sooner than its limit, since others take its requests."""


class Lateness:
    """The times of the last report of each stage, and of the iterations in flight, in one epoch."""

    def __init__(
        self,
        *,
        silence_limit_s: float,
        iteration_limit_s: float,
        hang_limit_s: float,
        suspicion_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        """`suspicion_s` returns the seconds beyond a multiple of the expected time after which an
        iteration is suspiciously late. It returns None if no other pipeline serves."""
        self._suspicion_s = suspicion_s
        self._silence_limit_s = silence_limit_s
        self._limit = IterationLimit(floor_s=hang_limit_s, ceiling_s=iteration_limit_s)
        self._now_s = 0.0  # seconds for which this process has run
        self._last_report_s: list[float] = []
        self._sent: dict[int, _Sent] = {}  # the iterations that have not returned
        self._returned_at = 0.0  # when the last iteration returned, by the event loop's clock
        self._returned_at_s = 0.0  # the same, in seconds for which this process has run

    def begin(self, n_stages: int) -> None:
        """Notes that all stages report from now on."""
        self._last_report_s = [self._now_s] * n_stages

    def note_report(self, stage_index: int) -> None:
        """Notes that a stage has sent a report."""
        self._last_report_s[stage_index] = self._now_s

    def note_sent(self, batch: Batch) -> None:
        """Notes that an iteration is in flight from now on."""
        now = asyncio.get_running_loop().time()
        self._sent[batch.iteration] = _Sent(batch, now, self._now_s)

    def note_returned(self, iteration: int) -> None:
        """Notes that an iteration has returned, and learns the usual time of iterations of this
        size."""
        now = asyncio.get_running_loop().time()
        sent = self._sent.pop(iteration, None)
        if sent is not None:
            self._limit.learn(sent.work(), now - max(sent.at, self._returned_at))
        self._returned_at, self._returned_at_s = now, self._now_s

    async def watch(self, on_late: Callable[[Late], None]) -> None:
        """Checks stages and iterations until cancelled, and calls `on_late` for each that is
        late."""
        loop = asyncio.get_running_loop()
        ticked_at = loop.time()
        pause_s = min(LOOK_S, self._silence_limit_s / 4, self._limit.ceiling_s / 4)
        while True:
            await asyncio.sleep(pause_s)
            before, ticked_at = ticked_at, loop.time()
            self._now_s += min(ticked_at - before, 2 * pause_s)
            for late in self._late():
                on_late(late)

    def _late(self) -> list[Late]:
        found = [
            Late(f"stage {index} has been silent for {self._silence_limit_s:g} s", index)
            for index, last_s in enumerate(self._last_report_s)
            if self._now_s - last_s > self._silence_limit_s
        ]
        sent = next(iter(self._sent.values()), None)
        if sent is not None:
            limit_s, is_suspicion = self._limit_of(sent)
            # An iteration may have waited for the one before it to return.
            if self._now_s - max(sent.at_s, self._returned_at_s) > limit_s:
                iteration = sent.batch.iteration
                reason = f"iteration {iteration} has not returned in {limit_s:.1f} s"
                found.append(Late(reason, None, is_suspicion))
        return found

    def _limit_of(self, sent: _Sent) -> tuple[float, bool]:
        """Returns the limit of an iteration in seconds, and whether a longer time is only a reason
        for suspicion."""
        limit_s = self._limit.of(sent.work())
        suspicion_s, multiple_s = self._suspicion_s(), self._limit.multiple_s(sent.work())
        if suspicion_s is None or multiple_s is None or suspicion_s + multiple_s >= limit_s:
            return limit_s, False
        if any(request.was_late for request in sent.batch.columns.requests):
            return limit_s, False
        return suspicion_s + multiple_s, True
