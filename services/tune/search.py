"""Predicts the outcome of a workload for given settings, and finds the settings with the best
outcome.

A prediction simulates the scheduler that a real system would use. The simulated and the real
scheduler are created by the same function. If two candidates have equal values, the candidate with
the lower latency is better.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from orcinus.v1 import worker_pb2

from services.scheduler.building import build_scheduler
from services.scheduler.core.admission.admission_control import AdmissionControl
from services.scheduler.core.request_pool import RequestPool
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
"""In the first step of `climb`, only every `COARSE`-th value of a setting is tried."""

EQUAL = 0.005
"""Two values count as equal if they differ by at most this fraction of the larger one."""

MAX_HASTE, FIRST_HASTE = 8.0, 2.0
"""Upper bounds of the arrival rates that are searched, as multiples of the rate at which the first
candidate serves requests that all arrive at once. `MAX_HASTE` is for all candidates, `FIRST_HASTE`
for the first one. If a candidate keeps the latency limits above the bound for the first one, the
limits are so wide that they have no effect."""
LEAST_RATE = 1e-3
"""Lowest rate that is tried, as a fraction of the upper bound for the first candidate."""
GROWTH = 1.1
"""For a later candidate, the first upper bound of the searched rates is the highest rate of the
earlier candidates multiplied by this factor. The bound is raised each time a rate keeps the
limits."""
PRECISION = 0.015
"""Relative precision of the highest arrival rate that a search finds."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A combination of settings, which the tuner may choose."""

    layout: Layout
    max_batch_size: int
    max_batch_tokens: int

    def __str__(self) -> str:
        return f"{self.layout}, batches of {self.max_batch_size} and {self.max_batch_tokens} tokens"


@dataclass(frozen=True, slots=True)
class Memory:
    """The size of the K/V memory, in slots, and the number of slots of a block."""

    n_slots: int
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted outcome of a workload with a candidate's settings."""

    candidate: Candidate
    value: float
    """The value to maximise: tokens per second or, with latency limits, the number of requests per
    second that keep the limits."""
    latency_s: float
    outcome: Outcome
    rate: float | None
    """Arrival rate of the predicted run, in requests per second. None if all requests arrive at
    once."""


class SearchGivenUp(Exception):
    """Raised in the thread of a search after another thread has cancelled the search."""


Predict = Callable[[Candidate], Prediction]


class Predictor:
    """Predicts outcomes for the candidates of one layout, from the costs of iterations with this
    layout. Each prediction is computed once and kept."""

    def __init__(self, costs: Costs, workload: Workload, memory: Memory) -> None:
        self._costs = costs
        self._workload = workload
        self._memory = memory
        self._known: dict[Candidate, Prediction] = {}
        self._is_given_up = False
        self._highest_rate = 0.0  # highest rate at which any candidate has kept the limits
        self._rate_limit = 0.0

    def __call__(self, candidate: Candidate) -> Prediction:
        """Returns the prediction for a candidate, which must have the predictor's layout."""
        if candidate not in self._known:
            self._known[candidate] = self._predict(candidate)
        return self._known[candidate]

    def anew(self) -> "Predictor":
        """Returns a new predictor with the same costs and without the predictions of this one.

        If the goal is the highest arrival rate within the latency limits, a predictor finds the
        true highest rate only for its first candidate. For a later candidate, the search begins at
        the highest rate of the earlier candidates, and does not try lower rates.
        """
        return Predictor(self._costs, self._workload, self._memory)

    def give_up(self) -> None:
        """Cancels a search in another thread: the next simulation there raises `SearchGivenUp`."""
        self._is_given_up = True

    def simulation(
        self,
        candidate: Candidate,
        *,
        rate: float | None = None,
        arrivals: Sequence[Arrival] | None = None,
    ) -> Simulation:
        """Returns a simulation that has not begun. It has the requests `arrivals` or, if that is
        None, the whole workload with arrivals at `rate` requests per second. If `rate` is None,
        too, the rate of the workload is used.

        Raises:
            SearchGivenUp: `give_up` was called.
        """
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
        """Returns two values: the outcome at the highest arrival rate at which a candidate keeps
        the latency limits, and this rate.

        The search begins at the highest rate of the earlier candidates. A candidate that does not
        keep the limits at that rate is worse than an earlier candidate, so lower rates are not
        tried. The method then returns that rate, and the outcome at that rate, whose goodput shows
        how much worse the candidate is.
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
            # This rate is higher than that of any earlier candidate, so the bound is raised, too.
            if self._highest_rate:
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
    pool: RequestPool | None = None,
) -> LearningScheduler:
    """Returns a scheduler with a candidate's settings, which runs in the simulated time of `clock`.
    Several schedulers may share one `pool`. If `pool` is None, the scheduler gets a new one."""
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
    scheduler = build_scheduler(settings, pipeline, new_pool() if pool is None else pool)
    scheduler.adopt()
    pace = Pace(AdmissionControl(goal_s=None, is_fair=False), settings, now=clock.now)
    observer = pace.observe(pipeline, scheduler)
    observer.opened()
    return LearningScheduler(scheduler, observer)


def new_pool() -> RequestPool:
    """Returns the pool of a simulation, without requests."""
    return RequestPool(max_requests=2**15)


def best_of(predictions: Sequence[Prediction]) -> Prediction:
    """Returns the best prediction: the one with the lowest latency among all predictions whose
    values count as equal to the highest value."""
    highest = max(prediction.value for prediction in predictions)
    equal = [each for each in predictions if each.value >= (1 - EQUAL) * highest]
    return min(equal, key=lambda prediction: prediction.latency_s)


def search(layout: Layout, predict: Predict, *, n_requests: int) -> Prediction:
    """Returns the best prediction for a layout, found by coordinate descent: the best batch size is
    searched first, then the best number of tokens of a batch, then the batch size again.
    `n_requests` limits the batch sizes that are tried."""
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
    """Returns the best prediction among the values of one setting. `ladder` has the values in
    ascending order, and `change` makes a candidate from a value. Every second value is tried first,
    and then the two neighbours of the best of these values."""
    tried = {index: predict(change(ladder[index])) for index in range(0, len(ladder), COARSE)}
    best = best_of(list(tried.values()))
    place = next(index for index, prediction in tried.items() if prediction is best)
    for index in (place - 1, place + 1):
        if 0 <= index < len(ladder) and index not in tried:
            tried[index] = predict(change(ladder[index]))
    return best_of(list(tried.values()))
