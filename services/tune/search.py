"""Predicts how a workload would go with given settings, and finds those with which it goes best.

The scheduler in a prediction is the one that serves, put together by the same function. Of settings
that come out equal, the one with the lower latency is the better.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from orcinus.v1 import worker_pb2

from services.scheduler.core.admission.admission_control import AdmissionControl
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.leader import build_scheduler
from services.scheduler.observing.pace import Pace
from services.scheduler.pipeline.membership import Member, Pipeline
from services.scheduler.settings import SchedulerSettings
from services.tune.layout import Layout
from services.tune.learning_scheduler import LearningScheduler
from services.tune.workload import Workload
from simulator.costs import Costs
from simulator.engine import Arrival, Simulation
from simulator.outcome import Outcome
from simulator.virtual_clock import VirtualClock

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BATCH_TOKENS = (64, 128, 256, 512, 1024, 2048)
COARSE = 2
"""Of a ladder, every so many steps are looked at first."""

EQUAL = 0.005
"""Settings whose values differ by no more count as equal."""

MAX_HASTE, FIRST_HASTE = 8.0, 2.0
"""Times the rate at which the first candidate serves requests that come at once, above which no
rate is looked for: limits that are kept there are none. And above which none is at first."""
LEAST_RATE = 1e-3
"""Part of that below which no rate is looked for."""
GROWTH = 1.1
"""Times the highest rate so far, up to which a higher one is looked for at first."""
PRECISION = 0.015
"""Part of itself to which the highest rate is found."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings that may be chosen."""

    layout: Layout
    max_batch_size: int
    max_batch_tokens: int

    def __str__(self) -> str:
        return f"{self.layout}, batches of {self.max_batch_size} and {self.max_batch_tokens} tokens"


@dataclass(frozen=True, slots=True)
class Memory:
    """K/V memory, as the scheduler counts it."""

    n_slots: int
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class Prediction:
    """How a workload is expected to go."""

    candidate: Candidate
    value: float
    """What is to be large: tokens a second, or requests a second that keep limits."""
    latency_s: float
    outcome: Outcome
    rate: float | None
    """Requests a second at which it was; None where all came at once."""


class SearchGivenUp(Exception):
    """Raised in the thread of a search whose result is not wanted any more."""


Predict = Callable[[Candidate], Prediction]


class Predictor:
    """Predictions for the settings of one layout, whose costs are known. Each is made once."""

    def __init__(self, costs: Costs, workload: Workload, memory: Memory) -> None:
        self._costs = costs
        self._workload = workload
        self._memory = memory
        self._known: dict[Candidate, Prediction] = {}
        self._is_given_up = False
        self._highest_rate = 0.0  # at which any candidate has kept the limits
        self._rate_limit = 0.0

    def __call__(self, candidate: Candidate) -> Prediction:
        """Returns the prediction for a candidate of the layout."""
        if candidate not in self._known:
            self._known[candidate] = self._predict(candidate)
        return self._known[candidate]

    def anew(self) -> "Predictor":
        """Returns a predictor that has seen no other candidates, whose rates a prediction would
        begin with: the first one that it makes is for the candidate's own highest rate."""
        return Predictor(self._costs, self._workload, self._memory)

    def give_up(self) -> None:
        """Ends a search in another thread, whose next simulation raises `SearchGivenUp`."""
        self._is_given_up = True

    def simulation(
        self,
        candidate: Candidate,
        *,
        rate: float | None = None,
        arrivals: Sequence[Arrival] | None = None,
    ) -> Simulation:
        """Returns a simulation that has not begun, of the workload or of some of its requests."""
        if self._is_given_up:
            raise SearchGivenUp
        clock = VirtualClock()
        scheduler = scheduler_of(candidate, self._memory, clock)
        requests = self._workload.arrivals(rate) if arrivals is None else arrivals
        return Simulation(scheduler, self._costs, requests, clock=clock)

    def _predict(self, candidate: Candidate) -> Prediction:
        workload = self._workload
        rate: float | None
        if workload.finds_rate:
            outcome, rate = self._at_highest_rate(candidate)
        else:
            outcome, rate = self.simulation(candidate).run(), workload.rate
        return Prediction(
            candidate,
            value=workload.value_of(outcome),
            latency_s=outcome.median_normalised_s,
            outcome=outcome,
            rate=rate,
        )

    def _at_highest_rate(self, candidate: Candidate) -> tuple[Outcome, float]:
        """Returns how it goes at the highest rate at which limits are kept, and that rate.

        It is looked for above the highest that other candidates have reached. One that does not
        keep limits there is worse, by as much as its goodput there is less.
        """
        low, high = self._highest_rate, GROWTH * self._highest_rate
        if low:
            found = self.simulation(candidate, rate=low).run()
            if not self._workload.is_kept_by(found):
                return found, low
        else:
            at_once = self.simulation(candidate).run().requests_per_s
            self._rate_limit, high = MAX_HASTE * at_once, FIRST_HASTE * at_once
            low = high * LEAST_RATE
            found = self.simulation(candidate, rate=low).run()
        while high - low > PRECISION * high:
            middle = (low + high) / 2
            tried = self.simulation(candidate, rate=middle).run()
            if not self._workload.is_kept_by(tried):
                high = middle
                continue
            if self._highest_rate:  # more than any candidate so far, and so perhaps much more
                high = min(max(high, GROWTH * middle), self._rate_limit)
            low, found = middle, tried
        if self._workload.is_kept_by(found):
            self._highest_rate = low
        return found, low


def scheduler_of(
    candidate: Candidate,
    memory: Memory,
    clock: VirtualClock,
    *,
    policy: Literal["orca", "chunked"] = "chunked",
) -> LearningScheduler:
    """Returns the scheduler that would serve with a candidate's settings, by a clock."""
    stages = candidate.layout.stages
    settings = SchedulerSettings(
        stages=",".join(f"stage:{1 + index}" for index in range(stages)),
        policy=policy,
        max_batch_size=candidate.max_batch_size,
        max_batch_tokens=candidate.max_batch_tokens,
        prefix_cache=False,  # the workload's prompts have nothing in common
    )
    stage = worker_pb2.DescribeResponse(
        block_size=memory.block_size, n_kv_blocks=max(1, memory.n_slots // memory.block_size)
    )
    pipeline = Pipeline("simulated", 1, tuple(Member("", stage) for _ in range(stages)))
    scheduler = build_scheduler(settings, pipeline, RequestPool(max_requests=2**15))
    pace = Pace(AdmissionControl(goal_s=None, is_fair=False), settings, now=clock.now)
    return LearningScheduler(scheduler, pace.observe(pipeline, scheduler))


def best_of(predictions: Sequence[Prediction]) -> Prediction:
    """Returns the best of some predictions: of all that are as good as the best, the one with the
    lowest latency."""
    highest = max(prediction.value for prediction in predictions)
    equal = [each for each in predictions if each.value >= (1 - EQUAL) * highest]
    return min(equal, key=lambda prediction: prediction.latency_s)


def search(layout: Layout, predict: Predict, *, n_requests: int) -> Prediction:
    """Returns the best prediction for a layout: one setting is changed after the other, and the
    first once more."""
    sizes = [size for size in BATCH_SIZES if size < 2 * n_requests]
    best = predict(Candidate(layout, min(32, sizes[-1]), 512))

    def sized(size: int) -> Candidate:
        now = best.candidate
        return replace(now, max_batch_size=size, max_batch_tokens=max(size, now.max_batch_tokens))

    def tokened(n_tokens: int) -> Candidate:
        now = best.candidate
        return replace(now, max_batch_tokens=max(n_tokens, now.max_batch_size))

    for ladder, change in ((sizes, sized), (BATCH_TOKENS, tokened), (sizes, sized)):
        best = climb(ladder, change, predict)
    return best


def climb(
    ladder: Sequence[int], change: Callable[[int], Candidate], predict: Predict
) -> Prediction:
    """Returns the best of a ladder of values of one setting: some steps are looked at first, and
    then those beside the best of them."""
    tried = {index: predict(change(ladder[index])) for index in range(0, len(ladder), COARSE)}
    best = best_of(list(tried.values()))
    place = next(index for index, prediction in tried.items() if prediction is best)
    for index in (place - 1, place + 1):
        if 0 <= index < len(ladder) and index not in tried:
            tried[index] = predict(change(ladder[index]))
    return best_of(list(tried.values()))
