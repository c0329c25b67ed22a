"""The observer of pace: it measures how fast pipelines are for the admission control, and the
fixed cost of an iteration, which does not depend on its tokens, for the scheduling core."""

import logging
import time
from collections.abc import Callable, Sequence

from orcinus.v1 import scheduler_pb2, worker_pb2

from services.common.errors import OrcinusError
from services.scheduler.core.admission.admission_control import AdmissionControl
from services.scheduler.core.admission.forecast import Machine
from services.scheduler.core.batch import Batch, Update
from services.scheduler.core.request import FinishReason, Request
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.pipeline.membership import Pipeline
from services.scheduler.settings import SchedulerSettings

log = logging.getLogger(__name__)


class Pace:
    """An observer of all requests. It makes an observer of the iterations of each epoch."""

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
        """Prepares for the epoch that is about to form, and returns its observer."""
        n_shares = 1 if pipeline.n_stages == 1 else scheduler.pipeline_depth
        settings = self._settings
        self._control.open(
            Machine(
                scheduler.pool,
                scheduler.kv_manager,
                max_running=settings.max_batch_size * n_shares,
                prompt_groups=scheduler.policy.prompt_groups,
            )
        )
        return PaceOfEpoch(self._control, self._now)

    def submitted(self, request: Request, submission: scheduler_pb2.Submission) -> None: ...

    def rejected(self, submission: scheduler_pb2.Submission, error: OrcinusError) -> None: ...

    def admitted(self, request: Request) -> None:
        self._control.forecast.learn_admission(request)

    def first_token(self, request: Request) -> None:
        self._control.note_first_token(request, self._now())

    def suspended(self, request: Request) -> None:
        self._control.note_end(request)

    def preempted(self, request: Request) -> None: ...

    def ended(self, request: Request, reason: FinishReason) -> None:
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._control.expected.learn(len(request.generated_token_ids), request.max_new_tokens)
        self._control.note_end(request)

    def failed(self, request: Request) -> None:
        self._control.note_end(request)


class PaceOfEpoch:
    """An observer of the iterations of one epoch."""

    def __init__(self, control: AdmissionControl, now: Callable[[], float]) -> None:
        self._control = control
        self._now = now
        # Of each iteration: when it was sent, and its numbers of spans and of tokens.
        self._in_flight: dict[int, tuple[float, int, int]] = {}
        self._last_return = 0.0

    def opened(self) -> None: ...

    def sent(self, batch: Batch, scheduler: Scheduler) -> None:
        self._in_flight[batch.iteration] = self._now(), len(batch.spans), batch.n_tokens

    def returned(self, iteration: int, updates: Sequence[Update], scheduler: Scheduler) -> None:
        sent_at, n_spans, n_tokens = self._in_flight.pop(iteration)
        now = self._now()
        self._control.forecast.learn_iteration(
            n_spans=n_spans,
            n_tokens=n_tokens,
            n_new=len(updates),
            time_s=now - max(sent_at, self._last_return),
        )
        self._last_return = now
        overhead_tokens = self._control.forecast.overhead.n_tokens
        if scheduler.learn_overhead(overhead_tokens):
            log.info("an iteration costs as much as %d tokens of prompts", overhead_tokens)

    def timed(self, stage_index: int, timing: worker_pb2.IterationTiming) -> None: ...

    def closed(self, loss: str | None) -> None: ...
