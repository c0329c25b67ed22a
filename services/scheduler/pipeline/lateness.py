"""Lateness: detects a stage that is silent for too long, and an iteration that does not return.

A late iteration is suspected to be stuck long before its limit (`suspicion.py`). The suspicion ends
nothing: where other pipelines serve, requests of the pipeline go on there, and the pipeline goes on
when the iteration returns. Each iteration is suspected at most once. But a stage that is silent
while an iteration is late has probably a stopped process or a cut network. So the stage counts as
lost sooner than without a late iteration.

Time is counted only while this process runs. While the process is stopped or starved, it reads no
reports, and the stages that sent them are not silent.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from services.common.iteration_limit import IterationLimit, IterationSize
from services.scheduler.core.batch import Batch
from services.scheduler.pipeline.suspicion import WRONG_WITHIN, Suspicion

LOOK_S = 0.2
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
class _Suspected:
    """The iteration that was last suspected to be stuck."""

    iteration: int
    limit_s: float

    def was_wrong(self, elapsed_s: float) -> bool:
        """Returns whether the iteration was suspected too soon. `elapsed_s` are the seconds after
        which it has returned."""
        return elapsed_s < WRONG_WITHIN * self.limit_s


@dataclass(frozen=True, slots=True)
class Late:
    """A stage or an iteration that is late."""

    reason: str
    stage_index: int | None
    """The stage that is silent; None if an iteration is late."""
    is_suspicion: bool = False
    """Whether the iteration is only suspected to be stuck: it has not reached its time limit."""


class Lateness:
    """Detects the silent stages and late iterations of one epoch."""

    def __init__(
        self,
        *,
        silence_limit_s: float,
        iteration_limit_s: float,
        hang_limit_s: float,
        suspicion: Suspicion | None = None,
        may_suspect: Callable[[], bool] = lambda: False,
    ) -> None:
        """`suspicion` says after which time an iteration is suspected; all pipelines share it.
        `may_suspect` returns whether requests could go on in another pipeline."""
        self._suspicion = suspicion or Suspicion()
        self._may_suspect = may_suspect
        self._silence_limit_s = silence_limit_s
        self._limit = IterationLimit(floor_s=hang_limit_s, ceiling_s=iteration_limit_s)
        self._pause_s = min(LOOK_S, silence_limit_s / 4, self._limit.ceiling_s / 4)
        self._now_s = 0.0  # seconds for which this process has run
        self._last_report_s: list[float] = []
        self._sent: dict[int, _Sent] = {}  # the iterations that have not returned
        self._suspected = _Suspected(0, 0.0)
        self._was_held_up = False  # whether the last iteration was suspected rightly
        self._returned_at = 0.0  # when the last iteration returned, by the event loop's clock
        self._returned_at_s = 0.0  # the same, in seconds for which this process has run

    def begin(self, n_stages: int) -> None:
        """Begins to measure for how long each of the `n_stages` stages has sent no report."""
        self._last_report_s = [self._now_s] * n_stages

    def note_report(self, stage_index: int) -> None:
        """Notes that a stage has sent a report."""
        self._last_report_s[stage_index] = self._now_s

    def note_sent(self, batch: Batch) -> None:
        """Notes that an iteration is in flight from now on."""
        now = asyncio.get_running_loop().time()
        self._sent[batch.iteration] = _Sent(batch, now, self._now_s)

    def note_returned(self, iteration: int) -> float | None:
        """Notes that an iteration has returned, and learns the usual time of iterations of this
        size. Returns the seconds that the iteration took if it was suspected, otherwise None.

        Nothing is learned from an iteration that was suspected rightly: if its time counted as
        usual, the next late iteration would be suspected later. But if the iteration before it was
        suspected rightly, too, the pipeline has become slow, and the time is learned.
        """
        now = asyncio.get_running_loop().time()
        sent, suspected = self._sent.pop(iteration, None), self._suspected
        elapsed_s = None if sent is None else self._elapsed_s(sent, now)
        self._returned_at, self._returned_at_s = now, self._now_s
        if sent is None or elapsed_s is None:
            return None
        is_suspected = suspected.iteration == iteration
        was_wrong = is_suspected and suspected.was_wrong(elapsed_s)
        if was_wrong:
            self._suspicion.note_wrong()
        was_held_up, self._was_held_up = self._was_held_up, is_suspected and not was_wrong
        if was_held_up or not self._was_held_up:
            self._limit.learn(sent.work(), elapsed_s)
        return elapsed_s if is_suspected else None

    async def watch(self, on_late: Callable[[Late], None]) -> None:
        """Checks stages and iterations until cancelled, and calls `on_late` for each that is
        late."""
        loop = asyncio.get_running_loop()
        ticked_at = loop.time()
        while True:
            await asyncio.sleep(self._pause_s)
            before, ticked_at = ticked_at, loop.time()
            for late in self.look(ticked_at - before):
                on_late(late)

    def look(self, since_s: float) -> list[Late]:
        """Returns the stages that are silent for too long, and the oldest iteration in flight if it
        is late or suspiciously late. `since_s` are the seconds since the last check."""
        self._now_s += min(since_s, 2 * self._pause_s)
        sent = next(iter(self._sent.values()), None)
        limit_s = self._silence_limit_s
        if sent is not None and self._is_suspicious(sent):
            limit_s = min(limit_s, self._suspicion.silence_s)
        found = [
            Late(f"stage {index} has been silent for {limit_s:g} s", index)
            for index, last_s in enumerate(self._last_report_s)
            if self._now_s - last_s > limit_s
        ]
        if sent is not None and (late := self._late_iteration(sent)) is not None:
            found.append(late)
        return found

    def _elapsed_s(self, sent: _Sent, now: float) -> float:
        """Returns the seconds since an iteration began: since it was sent, or since the iteration
        before it returned if that was later. Seconds in which this process was stopped do not
        count."""
        running_s = self._now_s - max(sent.at_s, self._returned_at_s)
        return min(now - max(sent.at, self._returned_at), running_s + self._pause_s)

    def _running_s(self, sent: _Sent) -> float:
        """Returns the seconds since the oldest iteration in flight began. Seconds in which this
        process was stopped do not count."""
        return self._now_s - max(sent.at_s, self._returned_at_s)

    def _suspicious_s(self, sent: _Sent) -> float:
        """Returns the seconds after which an iteration is suspicious, or infinity before any
        iteration has been measured."""
        expected_s = self._limit.expected_s(sent.work())
        return math.inf if expected_s is None else self._suspicion.limit_s(expected_s)

    def _is_suspicious(self, sent: _Sent) -> bool:
        """Returns whether the oldest iteration in flight is suspiciously late."""
        return self._running_s(sent) > self._suspicious_s(sent)

    def _late_iteration(self, sent: _Sent) -> Late | None:
        """Returns the oldest iteration in flight if it is late, or is now suspected first."""
        iteration, limit_s = sent.batch.iteration, self._limit.of(sent.work())
        reason = "iteration {} has not returned in {:.1f} s"
        if self._running_s(sent) > limit_s:
            return Late(reason.format(iteration, limit_s), None)
        is_new = self._suspected.iteration != iteration
        if not is_new or not self._is_suspicious(sent) or not self._may_suspect():
            return None
        limit_s = self._suspicious_s(sent)
        self._suspected = _Suspected(iteration, limit_s)
        return Late(reason.format(iteration, limit_s), None, is_suspicion=True)
