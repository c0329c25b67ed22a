"""The expected time until the first token of a request, given the work that comes before it.

A request begins when all requests before it have begun and a place among the running requests is
free. A place is free from the start, or becomes free when a running request ends. So a request with
n requests before it begins when n + 1 places have become free. Running requests free their places
after the tokens that they are expected to generate. The requests that take these places free them
again one average output later. Where outputs are long, the wait for a place is the limit; where
prompts are long, the limit is the number of batches in which prompts begin. The forecast is the
longer of the two times.

The forecast makes no choice and has no clock; times are given by the caller, in seconds.
"""

import math
import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from services.scheduler.core.admission.backlog import WaitingWork
from services.scheduler.core.admission.expected_output import ExpectedOutput
from services.scheduler.core.admission.iteration_time import IterationTime
from services.scheduler.core.admission.overhead import Overhead
from services.scheduler.core.admission.prompt_groups import NoPromptGroups, PromptGroups
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.request import Request

FRESH_S = 0.05
"""The forecast of the times at which running requests end is reused for this many seconds."""

WEIGHT = 1 / 64
"""Weight of the last iteration, and of the last admission, in averages."""

GOLDEN = 0.618033988749895
"""The golden ratio less 1. The fractional parts of its multiples are spread evenly between 0 and 1,
however many multiples are taken."""


class Pool(Protocol):
    """The part of a request pool that a forecast depends on."""

    @property
    def running(self) -> Collection[Request]:
        """Requests that the pipeline has admitted and that have not ended."""
        ...


@dataclass(frozen=True, slots=True)
class Machine:
    """The parts of one pipeline on which a forecast depends."""

    pool: Pool
    kv_manager: KVManager
    max_running: int
    """Largest number of requests that may run at the same time."""
    prompt_groups: PromptGroups | NoPromptGroups
    """Knows how many prompts begin together in a batch."""


class Forecast:
    """Learns how fast one pipeline serves requests, and forecasts when a waiting request would get
    its first token."""

    def __init__(self, expected: ExpectedOutput) -> None:
        self._expected = expected
        self._machine: Machine | None = None
        self._time = IterationTime()
        self.overhead = Overhead(self._time)
        """The overhead of an iteration: its time without prompt tokens, as a number of prompt
        tokens."""
        self._n_sampled = 0.0  # sampled tokens of an iteration, on average
        self._cached_part = 0.0  # fraction of prompt tokens found in the prefix cache
        self._n_iterations = 0
        self._n_admitted = 0
        self._places: list[float] = []  # iterations until each place is free, ascending
        self._n_prefill_tokens = 0
        self._least_mean = 0.0
        self._looked_at = -math.inf
        self._n_iterations_then = 0
        self._n_admitted_then = 0

    @property
    def is_known(self) -> bool:
        """Whether enough iterations have been measured for a forecast."""
        return self._machine is not None and self._time.is_known

    @property
    def n_running(self) -> int:
        """Number of requests that the pipeline has admitted and that have not ended."""
        return 0 if self._machine is None else len(self._machine.pool.running)

    @property
    def used(self) -> float:
        """Used part of the pipeline, from 0 to 1: the part of the places for running requests that
        is in use, or the reserved part of the K/V memory if this is larger."""
        if self._machine is None:
            return 0.0
        kv_manager = self._machine.kv_manager
        n_most = min(self._machine.max_running, kv_manager.rows.max_rows or sys.maxsize)
        return max(self.n_running / n_most, kv_manager.n_reserved_slots / kv_manager.n_slots)

    def open(self, machine: Machine) -> None:
        """Begins to forecast for the pipeline `machine`. Drops the measured speed of the pipeline
        before."""
        self._machine = machine
        self._time = IterationTime()
        self.overhead = Overhead(self._time)
        self._looked_at = -math.inf

    def runs(self, request: Request) -> bool:
        """Returns whether the pipeline has admitted a request that has not ended."""
        return self._machine is not None and request in self._machine.pool.running

    def learn_iteration(self, *, n_spans: int, n_tokens: int, n_new: int, time_s: float) -> None:
        """Learns the speed from an iteration. The arguments are the numbers of spans, of tokens and
        of generated tokens, and the seconds for which the iteration occupied the pipeline."""
        self._n_iterations += 1
        self._n_sampled += WEIGHT * (n_new - self._n_sampled)
        self._time.learn(n_tokens - n_spans, time_s)
        self.overhead.note(n_tokens - n_spans)

    def learn_admission(self, request: Request) -> None:
        """Learns from an admitted request which fraction of its tokens was in the prefix cache.
        Nothing is learned about the cache from a request that has run before, because it finds its
        own tokens there."""
        self._n_admitted += 1
        if request.n_preemptions or request.generated_token_ids:
            return
        part = request.n_cached_tokens / request.n_prefill_tokens
        self._cached_part += WEIGHT * (part - self._cached_part)

    def first_token_s(self, before: WaitingWork, own: WaitingWork, now: float) -> float:
        """Returns the seconds from now until a request has its first token. The request needs the
        work `own`, and the work `before` is done first. Returns 0 until enough iterations have been
        measured."""
        machine = self._machine
        if machine is None or not self.is_known:
            return 0.0
        if now - self._looked_at >= FRESH_S:
            self._look(machine, now)
        n_tokens = (1 - self._cached_part) * (before.n_prompt_tokens + own.n_prompt_tokens)
        n_tokens += self._n_prefill_tokens
        n_iterations = self._n_until_place(machine, before)
        n_in_groups = machine.prompt_groups.n_iterations(
            before.n_requests + own.n_requests, n_tokens, n_running=len(machine.pool.running)
        )
        n_iterations = max(n_iterations, n_in_groups)
        return (n_iterations + 1) * self._time.base_s + n_tokens * self._time.token_s

    def _n_until_place(self, machine: Machine, before: WaitingWork) -> float:
        """Returns the number of iterations until a place is free for a new request, after all
        waiting requests before it have begun to run."""
        if not self._places:
            return 0.0
        n_begun = self._n_admitted - self._n_admitted_then
        n_turns, index = divmod(int(before.n_requests) + n_begun, len(self._places))
        mean = self._least_mean
        if self._expected.is_known and before.n_requests:
            mean = before.n_output_tokens / before.n_requests
        n_more = n_turns * mean * self._n_per_token(machine)
        n_passed = self._n_iterations - self._n_iterations_then
        return max(0.0, self._places[index] + n_more - n_passed)

    def _n_per_token(self, machine: Machine) -> float:
        """Returns the number of iterations in which each running request gets one token. The number
        is more than one where several batches take turns."""
        return max(1.0, len(machine.pool.running) / max(1.0, self._n_sampled))

    def _look(self, machine: Machine, now: float) -> None:
        """Computes when running requests will have ended and free their places. As long as too few
        requests have ended, their lengths are unknown. Every output is then assumed to be only as
        long as the running outputs are now."""
        self._looked_at = now
        self._n_iterations_then, self._n_admitted_then = self._n_iterations, self._n_admitted
        n_per_token = self._n_per_token(machine)
        self._n_prefill_tokens = 0
        places = [0.0] * self._n_free(machine)
        n_generated = 0
        for index, request in enumerate(machine.pool.running):
            self._n_prefill_tokens += max(0, request.n_prefill_tokens - request.n_scheduled)
            n_generated += len(request.generated_token_ids)
            if not self._expected.is_known:
                places.append(0.0)
                continue
            variation = self._expected.variation(request.max_new_tokens)
            # Lengths that vary are taken from an exponential distribution, at evenly spread places.
            chance = (0.5 + index * GOLDEN) % 1
            stretch = 1 - variation - variation * math.log(1 - chance)
            n_most = request.max_new_tokens - len(request.generated_token_ids)
            n_left = min(stretch * self._expected.n_left(request), n_most)
            places.append(n_per_token * n_left)
        self._places = sorted(places)
        self._least_mean = n_generated / max(1, len(machine.pool.running))

    def _n_free(self, machine: Machine) -> int:
        """Returns the number of further requests that could begin now, if each reserves as much
        memory as the running requests do on average."""
        n_running, kv_manager = len(machine.pool.running), machine.kv_manager
        n_most = machine.max_running
        if kv_manager.rows.max_rows is not None:
            n_most = min(n_most, kv_manager.rows.max_rows)
        n_free = max(0, n_most - n_running)
        if not n_free or not n_running:
            return n_free
        n_slots_each = kv_manager.n_reserved_slots / n_running
        n_slots_free = kv_manager.n_slots - kv_manager.n_reserved_slots
        return min(n_free, int(n_slots_free / max(1.0, n_slots_each)))
