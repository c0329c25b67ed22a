"""Makes a trace span for a stage's part of each traced iteration, from timings of a rank.

Ranks do not use OpenTelemetry. A rank reports its timings, and the controller makes the trace span,
whose parent is the scheduler's trace span that the plan names. The trace span begins when the plan
was forwarded, so that it includes the time for which the plan waited behind earlier iterations.
"""

from collections import deque

from opentelemetry.trace import Tracer
from orcinus.v1 import worker_pb2

from services.common import semconv, tracing

MAX_UNDER_WAY = 64
"""Number of plans whose forwarding time is remembered. A pipeline has fewer plans in flight."""


class StageTracer:
    """Makes the trace spans of one stage: one for each traced iteration."""

    def __init__(self, tracer: Tracer, stage_index: int) -> None:
        self._tracer = tracer
        self._stage_index = stage_index
        self._epoch = 0
        self._n_plans = 0
        self._forwarded: deque[int] = deque(maxlen=MAX_UNDER_WAY)

    def joined(self, epoch: int) -> None:
        """Begins an epoch, in which messages are numbered from 1."""
        self._epoch = epoch
        self._n_plans = 0
        self._forwarded.clear()

    def forwarded(self, now_ns: int) -> None:
        """Records the time at which the next message of the epoch was forwarded, in nanoseconds
        since 1970. The message is a plan, or an order about adapters."""
        self._n_plans += 1
        self._forwarded.append(now_ns)

    def record(self, payload: bytes) -> None:
        """Makes the trace span of one iteration from `payload`, the bytes of an IterationTrace."""
        trace = worker_pb2.IterationTrace.FromString(payload)
        timing = trace.timing
        began_ns = min(trace.start_unix_ns, self._forwarded_at(trace) or trace.start_unix_ns)
        spent_ns = timing.receive_ns + timing.compute_ns + timing.send_ns
        span = self._tracer.start_span(
            semconv.STAGE,
            tracing.from_message(trace.parent),
            attributes={
                semconv.STAGE_INDEX: self._stage_index,
                semconv.EPOCH: trace.epoch,
                semconv.ITERATION_NUMBER: timing.iteration,
                semconv.N_REQUESTS: trace.n_requests,
                semconv.BATCH_N_TOKENS: trace.n_tokens,
                semconv.QUEUE_WAIT: (trace.start_unix_ns - began_ns) / 1e9,
                semconv.RECEIVE_WAIT: timing.receive_ns / 1e9,
                semconv.COMPUTE: timing.compute_ns / 1e9,
                semconv.SEND_WAIT: timing.send_ns / 1e9,
            },
            start_time=began_ns,
        )
        span.end(trace.start_unix_ns + spent_ns)

    def _forwarded_at(self, trace: worker_pb2.IterationTrace) -> int | None:
        n_later = self._n_plans - trace.message_number
        if trace.epoch != self._epoch or not 0 <= n_later < len(self._forwarded):
            return None
        return self._forwarded[-1 - n_later]
