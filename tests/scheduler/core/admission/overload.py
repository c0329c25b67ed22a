"""An overloaded scheduler in simulated time, whose engine takes a known time for each iteration,
and callers whose requests are admitted or refused."""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from services.scheduler.core.admission.admission_control import AdmissionControl, TooLate
from services.scheduler.core.admission.forecast import Forecast, Machine
from services.scheduler.core.batch import Batch, Update
from services.scheduler.core.clients.accounts import AccountLimits, AccountUse
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.order.fair import Fair
from services.scheduler.core.order.fcfs import FirstComeFirstServed
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.request import FinishReason, Request, RequestId
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler

STOP, PLAIN = 7, 1


@dataclass(frozen=True)
class Caller:
    """A request that will arrive at the time `at`."""

    at: float
    n_prompt: int
    n_output: int
    max_tokens: int
    client: str | None = None
    priority: int = 0
    time_left: float | None = None


@dataclass(eq=False)
class Outcome:
    """What happened to a request."""

    caller: Caller
    retry_after_s: float | None = None
    """Retry delay of a request that was refused, otherwise None."""
    first_token_at: float | None = None
    ended_at: float | None = None
    reason: FinishReason | None = None
    foretold_s: float = 0.0
    n_waiting: int = 0
    """Number of requests that waited when this one arrived."""

    @property
    def wait_s(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.caller.at


@dataclass(eq=False)
class Line:
    """A pipeline, and the batch that it computes."""

    scheduler: Scheduler
    forecast: Forecast
    slowness: float
    batch: Batch | None = None
    time_s: float = 0.0
    ends_at: float = 0.0


@dataclass
class Engine:
    """An engine of one or more pipelines, and the scheduler in front of it."""

    goal_s: float | None
    is_fair: bool = False
    max_batch_size: int = 8
    max_batch_tokens: int = 64
    base_s: float = 0.01
    token_s: float = 0.0005
    n_blocks: int = 4096
    slowness: Sequence[float] = (1.0,)
    """For each pipeline, the factor by which its iterations take longer."""
    now: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.control = AdmissionControl(goal_s=self.goal_s, is_fair=self.is_fair)
        order = Fair(ageing_s=1000, now=lambda: self.now) if self.is_fair else None
        self.pool = RequestPool(
            max_requests=10**6, order=order or FirstComeFirstServed(), control=self.control
        )
        self.lines = [self._line(factor, index) for index, factor in enumerate(self.slowness)]
        self.scheduler = self.lines[0].scheduler
        self._by_request: dict[Request, Outcome] = {}
        self._accounts: dict[str, AccountUse] = {}

    def _line(self, slowness: float, index: int) -> Line:
        pool = self.pool.beside() if index else self.pool
        kv_manager = KVManager(n_blocks=self.n_blocks, block_size=16)
        policy = ChunkedPolicy(
            max_batch_size=self.max_batch_size, max_batch_tokens=self.max_batch_tokens
        )
        scheduler = Scheduler(pool, kv_manager, policy=policy, pipeline_depth=1)
        scheduler.adopt()
        machine = Machine(pool, kv_manager, self.max_batch_size, policy.prompt_groups)
        return Line(scheduler, self.control.open(machine), slowness)

    def run(self, callers: Sequence[Caller], *, until: float | None = None) -> list[Outcome]:
        """Serves the callers, and returns the outcome of each. If `until` is given, the run stops
        at this time."""
        coming = deque(sorted(callers, key=lambda caller: caller.at))
        while (coming or len(self.pool)) and (until is None or self.now < until):
            while coming and coming[0].at <= self.now:
                self._submit(coming.popleft())
            self._finish(self.scheduler.expire(self.now))
            for line in self.lines:
                if line.batch is None:
                    self._begin(line)
            busy = [line for line in self.lines if line.batch is not None]
            first = min(busy, key=lambda line: line.ends_at, default=None)
            has_idle = len(busy) < len(self.lines)
            if coming and (first is None or (has_idle and coming[0].at < first.ends_at)):
                self.now = coming[0].at
            elif first is not None:
                self.now = first.ends_at
                self._return(first)
        return self.outcomes

    def _submit(self, caller: Caller) -> None:
        index = len(self.outcomes)
        outcome = Outcome(caller, n_waiting=self.pool.n_waiting)
        self.outcomes.append(outcome)
        request = Request(
            request_id=RequestId(str(index)),
            prompt_token_ids=[PLAIN] * caller.n_prompt,
            max_new_tokens=caller.max_tokens,
            stop_token_ids=frozenset({STOP}),
            account=self._account(caller.client),
            priority=caller.priority,
            deadline=None if caller.time_left is None else caller.at + caller.time_left,
        )
        try:
            outcome.foretold_s = self.control.check(request, self.now)
        except TooLate as error:
            outcome.retry_after_s = error.retry_after_s
            return
        self.scheduler.submit(request)
        self.control.note_submitted(request, outcome.foretold_s, self.now)
        self._by_request[request] = outcome

    def _account(self, client: str | None) -> AccountUse | None:
        if client is None:
            return None
        if client not in self._accounts:
            self._accounts[client] = AccountUse(AccountLimits(), name=client)
        return self._accounts[client]

    def _begin(self, line: Line) -> None:
        batch = line.batch = line.scheduler.select()
        if batch is None:
            return
        n_new = sum(span.n_tokens for span in batch.spans) - len(batch.spans)
        line.time_s = line.slowness * (self.base_s + self.token_s * n_new)
        line.ends_at = self.now + line.time_s
        for span in batch.spans:
            if span.is_admission:
                self.control.forecasts.learn_admission(span.request)

    def _return(self, line: Line) -> None:
        batch, line.batch = line.batch, None
        assert batch is not None
        tokens = [self._next_token(span.request) for span in batch.spans if span.is_sampled]
        updates = line.scheduler.apply(batch.iteration, tokens)
        for update in updates:
            if update.token_id is not None and update.n_generated == 1:
                self._by_request[update.request].first_token_at = self.now
                self.control.note_first_token(update.request, self.now)
        self._finish(updates)
        line.forecast.learn_iteration(
            n_spans=len(batch.spans),
            n_tokens=sum(span.n_tokens for span in batch.spans),
            n_new=len(updates),
            time_s=line.time_s,
        )
        line.scheduler.learn_overhead(line.forecast.overhead.n_tokens)

    def _next_token(self, request: Request) -> int:
        caller = self._by_request[request].caller
        is_last = len(request.generated_token_ids) + 1 == caller.n_output
        return STOP if is_last else PLAIN

    def _finish(self, updates: Sequence[Update]) -> None:
        for update in updates:
            if update.finish_reason is not None:
                outcome = self._by_request.pop(update.request)
                outcome.ended_at, outcome.reason = self.now, update.finish_reason
                if update.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                    self.control.expected.learn(
                        len(update.request.generated_token_ids), update.request.max_new_tokens
                    )
                self.control.note_end(update.request)


def poisson(
    rate: float, for_s: float, make: Callable[[float, random.Random], Caller], *, seed: int
) -> Iterator[Caller]:
    """Yields callers that arrive as a Poisson process. `make` makes a caller from its time of
    arrival."""
    chance = random.Random(seed)
    at = chance.expovariate(rate)
    while at < for_s:
        yield make(at, chance)
        at += chance.expovariate(rate)


def goodput(outcomes: Sequence[Outcome], goal_s: float, *, since: float, until: float) -> float:
    """Returns the number of requests per second that ended between `since` and `until` and got
    their first token within `goal_s` seconds."""
    ended = [
        one
        for one in outcomes
        if one.ended_at is not None
        and since <= one.ended_at < until
        and one.wait_s is not None
        and one.wait_s <= goal_s
    ]
    return len(ended) / (until - since)
