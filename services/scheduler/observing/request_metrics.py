"""Counters and histograms of requests, kept by a request observer.

Every accepted request finishes, is cancelled, fails or times out exactly once. So while no request
is in the pool, the counter of accepted requests equals the sum of the other four counters.
"""

import time
from collections.abc import Mapping

from orcinus.v1 import scheduler_pb2
from prometheus_client import CollectorRegistry

from services.common import semconv
from services.common.errors import InvalidRequest, OrcinusError, PoolFull
from services.common.metrics import CALL_S, TOKENS
from services.common.own_metrics import Count, Counter, Distribution, Histogram
from services.scheduler.core.admission.admission_control import TooLate
from services.scheduler.core.clients.accounts import KeyInFlight, KeyRate
from services.scheduler.core.request import FinishReason, Request

REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "cancelled",
    FinishReason.FAILED: "failed",
    FinishReason.TIMED_OUT: "timed_out",
}
REJECTIONS = ("invalid", "pool_full", "key_limit", "too_late", "unavailable")


class RequestMetrics:
    """A request observer that keeps the metrics of requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._arrived_at: dict[Request, float] = {}  # times of arrival, until requests first run
        self._accepted = Counter(
            semconv.REQUESTS_ACCEPTED, "Requests taken into the pool.", registry=registry
        )
        self._ended = _ended(registry)
        self._broken = Counter(
            semconv.REQUESTS_BROKEN,
            "Requests that failed because the model's numbers for them were not finite.",
            registry=registry,
        )
        self._suspended = Counter(
            semconv.REQUESTS_SUSPENDED,
            "Times that a request was suspended because its pipeline was lost.",
            registry=registry,
        )
        self._preempted = Counter(
            semconv.PREEMPTIONS,
            "Times that a request was preempted for others, or since its pipeline drains.",
            registry=registry,
        )
        self._suspected = Counter(
            semconv.REQUESTS_SUSPECTED,
            "Times that a request was in a batch when its pipeline was lost, unless only late.",
            registry=registry,
        )
        self._moved = Counter(
            semconv.REQUESTS_MOVED,
            "Times that a request was admitted by another pipeline than before.",
            registry=registry,
        )
        self._changed_build = Counter(
            semconv.REQUESTS_CHANGED_BUILD,
            "Times that a request was continued by another build of the workers than before.",
            registry=registry,
        )
        self._resumed = Counter(
            semconv.REQUESTS_RESUMED,
            "Times that a request came to run again, here or after another scheduler.",
            registry=registry,
        )
        self._recomputed = Counter(
            semconv.RECOMPUTED_TOKENS,
            "Tokens of requests that came to run again, which are run as a prefill.",
            registry=registry,
        )
        self._rejected = _rejected(registry)
        self._queue_time = Histogram(
            semconv.REQUEST_QUEUE_TIME,
            "From the pool into the first batch.",
            buckets=CALL_S,
            registry=registry,
        )
        self._prompt_tokens = Counter(
            semconv.PROMPT_TOKENS, "Prompt tokens of requests that came to run.", registry=registry
        )
        self._lengths = _lengths(registry)

    def submitted(self, request: Request, submission: scheduler_pb2.Submission) -> None:
        self._accepted.inc()
        self._arrived_at[request] = time.perf_counter()

    def rejected(self, submission: scheduler_pb2.Submission, error: OrcinusError) -> None:
        self._rejected[_rejection(error)].inc()

    def admitted(self, request: Request) -> None:
        self._moved.inc(request.moved_from is not None)
        self._changed_build.inc(request.left_build is not None)
        arrived_at = self._arrived_at.pop(request, None)
        if arrived_at is not None:
            self._queue_time.observe(time.perf_counter() - arrived_at)
        if arrived_at is None or request.generated_token_ids:
            self._resumed.inc()
            self._recomputed.inc(request.n_prefill_tokens - request.n_cached_tokens)
        else:
            self._prompt_tokens.inc(request.n_prompt_tokens)

    def first_token(self, request: Request) -> None:
        """Does nothing. The time to the first token is measured by the frontend, where it includes
        the whole wait of a client."""

    def suspended(self, request: Request) -> None:
        self._suspended.inc()
        self._suspected.inc(request.is_suspect)

    def preempted(self, request: Request) -> None:
        self._preempted.inc()

    def ended(self, request: Request, reason: FinishReason) -> None:
        self._ended[reason].inc()
        self._broken.inc(request.is_broken and reason is FinishReason.FAILED)
        self._take_leave(request, REASONS[reason])

    def failed(self, request: Request) -> None:
        self.ended(request, FinishReason.FAILED)

    def _take_leave(self, request: Request, reason: str) -> None:
        self._arrived_at.pop(request, None)
        prompt, generation = self._lengths[reason]
        prompt.observe(request.n_prompt_tokens)
        generation.observe(len(request.generated_token_ids))


def _ended(registry: CollectorRegistry) -> Mapping[FinishReason, Count]:
    finished = Counter(
        semconv.REQUESTS_FINISHED,
        "Requests that ran to their end.",
        ["reason"],
        registry=registry,
    )
    cancelled = Counter(
        semconv.REQUESTS_CANCELLED, "Requests that were given up.", registry=registry
    )
    failed = Counter(
        semconv.REQUESTS_FAILED, "Requests that this scheduler gave up.", registry=registry
    )
    timed_out = Counter(
        semconv.REQUESTS_TIMED_OUT,
        "Requests whose time was up while they waited.",
        registry=registry,
    )
    return {
        FinishReason.STOP: finished.labels("stop"),
        FinishReason.LENGTH: finished.labels("length"),
        FinishReason.CANCELLED: cancelled.labels(),
        FinishReason.FAILED: failed.labels(),
        FinishReason.TIMED_OUT: timed_out.labels(),
    }


def _rejected(registry: CollectorRegistry) -> Mapping[str, Count]:
    rejected = Counter(
        semconv.REQUESTS_REJECTED,
        "Requests not taken into the pool.",
        ["reason"],
        registry=registry,
    )
    return {reason: rejected.labels(reason) for reason in REJECTIONS}


def _lengths(registry: CollectorRegistry) -> Mapping[str, tuple[Distribution, Distribution]]:
    prompt = Histogram(
        semconv.REQUEST_PROMPT_TOKENS,
        "Prompt tokens of a request that is over.",
        ["reason"],
        buckets=TOKENS,
        registry=registry,
    )
    generation = Histogram(
        semconv.REQUEST_GENERATION_TOKENS,
        "Generated tokens of a request that is over.",
        ["reason"],
        buckets=TOKENS,
        registry=registry,
    )
    return {
        reason: (prompt.labels(reason), generation.labels(reason)) for reason in REASONS.values()
    }


def _rejection(error: OrcinusError) -> str:
    if isinstance(error, InvalidRequest):
        return "invalid"
    if isinstance(error, KeyInFlight | KeyRate):
        return "key_limit"
    if isinstance(error, TooLate):
        return "too_late"
    return "pool_full" if isinstance(error, PoolFull) else "unavailable"
