"""Observers that measure how fast each pipeline is, for the admission control. They also tell the
scheduling core the fixed cost of an iteration, as a number of prompt tokens."""

import logging
import time
from collections.abc import Callable, Sequence

from orcinus.v1 import scheduler_pb2, worker_pb2

from services.common.errors import OrcinusError
from services.scheduler.core.admission.admission_control import AdmissionControl
from services.scheduler.core.admission.forecast import Forecast, Machine
from services.scheduler.core.batch import Batch, Update
from services.scheduler.core.request import FinishReason, Request
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.pipeline.membership import Pipeline
from services.scheduler.settings import SchedulerSettings

log = logging.getLogger(__name__)


class Pace:
    """A request observer that reports to the admission control. Also makes the observer of each
    epoch's iterations."""

    def __init__(
        self,
        control: AdmissionControl,
        settings: SchedulerSettings,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._control = control
        self._settings = settings
        self._now = now

    def observe(self, pipeline: Pipeline, scheduler: Scheduler) -> "PaceOfEpoch":
        """Returns the observer of an epoch that is about to form."""
        n_shares = 1 if pipeline.n_stages == 1 else scheduler.pipeline_depth
        machine = Machine(
            scheduler.pool,
            scheduler.kv_manager,
            max_running=self._settings.max_batch_size * n_shares,
            prompt_groups=scheduler.policy.prompt_groups,
        )
        return PaceOfEpoch(self._control, machine, self._now)

    def submitted(self, request: Request, submission: scheduler_pb2.Submission) -> None: ...

    def rejected(self, submission: scheduler_pb2.Submission, error: OrcinusError) -> None: ...

    def admitted(self, request: Request) -> None:
        self._control.forecasts.learn_admission(request)

    def first_token(self, request: Request) -> None:
        self._control.note_first_token(request, self._now())

    def suspended(self, request: Request) -> None:
        self._control.note_end(request)

    def preempted(self, request: Request) -> None: ...

    def ended(self, request: Request, reason: FinishReason) -> None:
        if reason in (FinishReason.STOP, FinishReason.LENGTH) and not request.wants_vector:
            self._control.expected.learn(len(request.generated_token_ids), request.max_new_tokens)
        self._control.note_end(request)

    def failed(self, request: Request) -> None:
        self._control.note_end(request)


class PaceOfEpoch:
    """An observer of the iterations of one epoch: it measures how fast the pipeline is."""

    def __init__(
        self, control: AdmissionControl, machine: Machine, now: Callable[[], float]
    ) -> None:
        self._control = control
        self._machine = machine
        self._now = now
        self._forecast: Forecast | None = None  # while the pipeline serves
        # Of each iteration: when it was sent, and its numbers of spans and of tokens.
        self._in_flight: dict[int, tuple[float, int, int]] = {}
        self._last_return = 0.0

    def opened(self) -> None:
        self._forecast = self._control.open(self._machine)

    def sent(self, batch: Batch, scheduler: Scheduler) -> None:
        self._in_flight[batch.iteration] = self._now(), len(batch.spans), batch.n_tokens

    def returned(self, iteration: int, updates: Sequence[Update], scheduler: Scheduler) -> None:
        now, sent = self._now(), self._in_flight.pop(iteration, None)
        if self._forecast is None or sent is None:
            self._last_return = now
            return
        sent_at, n_spans, n_tokens = sent
        self._forecast.learn_iteration(
            n_spans=n_spans,
            n_tokens=n_tokens,
            n_new=len(updates),
            time_s=now - max(sent_at, self._last_return),
        )
        self._last_return = now
        overhead_tokens = self._forecast.overhead.n_tokens
        if scheduler.learn_overhead(overhead_tokens):
            log.info("an iteration costs as much as %d tokens of prompts", overhead_tokens)

    def timed(self, stage_index: int, timing: worker_pb2.IterationTiming) -> None: ...

    def late(self, reason: str, moved: Sequence[Request]) -> None:
        self._in_flight.clear()  # the pipeline is held up, and would look slow

    def closed(self, loss: str | None) -> None:
        if self._forecast is not None:
            self._control.close(self._forecast)
            self._forecast = None
