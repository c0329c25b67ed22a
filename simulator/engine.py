"""The engine in virtual time: runs requests through schedulers and pipelines of known costs.

arrival or result → submit or apply → select while batches may be sent → stages, one after the other

The engine does the work of the serving loop, the engine master and the ranks. At each point in
time, arrivals are submitted, then results are applied, and after each event batches are sent.
Usually there is one scheduler with one pipeline. A `Site` has several of them side by side, each
with a pipeline of its own. Sampled tokens have no meaning here: a request ends after the number of
tokens in its trace. Prompt tokens have a meaning only where requests may share prefixes.
"""

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, groupby
from typing import NamedTuple

from services.scheduler.core.batch import Batch
from services.scheduler.core.clients.accounts import AccountUse
from services.scheduler.core.request import TOKEN_ID, Request, RequestId
from simulator.costs import Costs
from simulator.outcome import Outcome, RequestTimes
from simulator.site import Alone, Scheduling, Site
from simulator.virtual_clock import VirtualClock
from simulator.virtual_pipeline import VirtualPipeline
from simulator.workload import Lengths

A_TOKEN, STOP_TOKEN = 7, 0
NEVER_S = float("inf")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a trace. Its output ends after `n_output` tokens, even if `max_new_tokens` is
    larger."""

    time_s: float
    n_prompt: int
    n_output: int
    max_new_tokens: int | None = None
    """Largest number of output tokens that is passed to the scheduler; None means `n_output`."""
    prompt_token_ids: Sequence[int] | None = None
    """The `n_prompt` tokens of the prompt, for a prefix cache. If None, the request shares no
    prefix."""
    account: AccountUse | None = None
    """Account of the request; None if the request has no account."""

    def request(self, name: int) -> Request:
        """Returns the request for the scheduler; `name` becomes its id."""
        shares = self.prompt_token_ids is not None
        return Request(
            RequestId(str(name)),
            array(TOKEN_ID, self.prompt_token_ids or [A_TOKEN] * self.n_prompt),
            self.max_new_tokens or self.n_output,
            stop_token_ids=frozenset((STOP_TOKEN,)),
            account=self.account,
            cache_scope=b"" if shares else None,
        )


def arrivals_of(lengths: Sequence[Lengths], times_s: Sequence[float]) -> list[Arrival]:
    """Returns requests with the given lengths and times of arrival."""
    return [
        Arrival(time_s, each.n_prompt, each.n_output)
        for each, time_s in zip(lengths, times_s, strict=True)
    ]


class Returned(NamedTuple):
    """A batch that has returned, and the index of its pipeline."""

    pipeline: int
    batch: Batch


class Simulation:
    """One run, from the first arrival until all requests have ended or until a given time."""

    def __init__(
        self,
        scheduler: Scheduling | Site,
        costs: Costs,
        arrivals: Sequence[Arrival],
        *,
        clock: VirtualClock | None = None,
    ) -> None:
        """Creates a run of one scheduler, or of a site with several schedulers, whose pipelines
        have equal costs. The schedulers must be new. Their `pipeline_depth` and `token_hand_off`
        should fit the number of stages. `clock` must be given if a scheduler reads that clock."""
        self.clock = VirtualClock() if clock is None else clock
        """The virtual time."""
        self.progress: list[tuple[int, float]] = []
        """For each iteration that has returned: the number of tokens of prompts and outputs that
        were computed so far, and the time of the return."""
        self._site: Site = scheduler if isinstance(scheduler, Site) else Alone(scheduler)
        self._costs = costs
        self.arrivals = sorted(arrivals, key=lambda arrival: arrival.time_s)
        """The requests, in the order of their times of arrival."""
        self._of: dict[Request, Arrival] = {}
        self._first_token_s: dict[Request, float] = {}
        self._last_token_s: dict[Request, float] = {}
        self._gaps_s = array("d")
        self._ended: list[RequestTimes] = []
        self._pipelines = [VirtualPipeline(costs) for _ in self._site.schedulers]
        self._results: list[tuple[float, int, Returned]] = []  # a heap, by the times of return
        self._order = count()
        self._n_computed = self._n_submitted = 0
        self._n_output = self._n_iterations = self._n_spans = self._max_reserved_slots = 0
        self._n_reserved_slots = [0] * len(self._pipelines)

    def run(self, until_s: float = NEVER_S) -> Outcome:
        """Runs until all requests have ended, or until the virtual time `until_s`, in seconds.
        Returns the outcome.

        Raises:
            InvalidRequest: a request could not run even if it were the only request.
            PoolFull: there are more requests than the pool may hold.
        """
        start_s = end_s = self.arrivals[0].time_s
        for event_s, event in self._events():
            if event_s > until_s:
                self.clock.now_s = end_s = until_s
                break
            self.clock.now_s = event_s
            if event:
                end_s = event_s
            if isinstance(event, Returned):
                self._return(*event)
            elif event:
                for arrival in event:
                    self._submit(arrival)
            else:
                self._site.woken.update(dict.fromkeys(range(len(self._pipelines))))
            self._send_batches()
        duration_s = max(end_s - start_s, 1e-12)
        return Outcome(
            requests=tuple(self._ended),
            n_output=self._n_output,
            duration_s=duration_s + self._costs.request_s,
            n_iterations=self._n_iterations,
            mean_batch_size=self._n_spans / max(1, self._n_iterations),
            max_reserved_slots=self._max_reserved_slots,
            busy=tuple(
                busy_s / duration_s for pipeline in self._pipelines for busy_s in pipeline.busy_s
            ),
            gaps_s=self._gaps_s,
        )

    def _events(self) -> Iterator[tuple[float, "Returned | Sequence[Arrival]"]]:
        """Yields events with their times, in the order of time. An event is all arrivals at one
        time, a returned batch, or an empty sequence at a time that was set by
        `VirtualClock.wake_at`."""
        coming = deque(
            (time_s, tuple(group))
            for time_s, group in groupby(self.arrivals, key=lambda arrival: arrival.time_s)
        )
        while True:
            arrival_s = coming[0][0] if coming else NEVER_S
            result_s = self._results[0][0] if self._results else NEVER_S
            wake_s = self.clock.next_wake_s
            if arrival_s <= min(result_s, wake_s) and coming:
                yield coming.popleft()
            elif result_s <= wake_s and self._results:
                _, _, returned = heappop(self._results)
                yield result_s, returned
            elif wake_s < NEVER_S:
                self.clock.take_wake()
                yield wake_s, ()
            else:
                return

    def _submit(self, arrival: Arrival) -> None:
        request = arrival.request(self._n_submitted)
        self._n_submitted += 1
        self._of[request] = arrival
        self._site.submit(request)

    def _send_batches(self) -> None:
        """Makes the schedulers that were woken select batches, until none has another batch to
        send."""
        woken = self._site.woken
        while woken:
            index = next(iter(woken))
            del woken[index]
            scheduler = self._site.schedulers[index]
            while (batch := scheduler.select()) is not None:
                scheduler.take_preempted()
                result_s = self._pipelines[index].send(batch, self.clock.now_s)
                heappush(self._results, (result_s, next(self._order), Returned(index, batch)))
                self._n_iterations += 1
                self._n_spans += len(batch.spans)
            self._n_reserved_slots[index] = scheduler.n_reserved_slots
        self._max_reserved_slots = max(self._max_reserved_slots, sum(self._n_reserved_slots))

    def _return(self, index: int, batch: Batch) -> None:
        now_s = self.clock.now_s
        self._n_computed += batch.n_tokens
        self.progress.append((self._n_computed, now_s))
        token_ids = [self._token_of(span.request) for span in batch.spans if span.is_sampled]
        for update in self._site.schedulers[index].apply(batch.iteration, token_ids):
            request = update.request
            if update.token_id is not None:
                self._n_output += 1
                self._note_token(request, now_s)
            if update.finish_reason is not None:
                self._end(request)
        self._site.woken[index] = None

    def _note_token(self, request: Request, now_s: float) -> None:
        if request in self._last_token_s:
            self._gaps_s.append(now_s - self._last_token_s[request])
        else:
            self._first_token_s[request] = now_s
        self._last_token_s[request] = now_s

    def _token_of(self, request: Request) -> int:
        """Returns the next token of a request: the stop token if this is the last one. The token of
        a request that has ended has no meaning."""
        arrival = self._of.get(request)
        if arrival is None:
            return A_TOKEN
        n_generated = len(request.generated_token_ids)
        return STOP_TOKEN if n_generated + 1 >= arrival.n_output else A_TOKEN

    def _end(self, request: Request) -> None:
        arrival = self._of.pop(request)
        del self._last_token_s[request]
        delay_s = self._costs.request_s
        self._ended.append(
            RequestTimes(
                arrival_s=arrival.time_s,
                first_token_s=self._first_token_s.pop(request) + delay_s,
                end_s=self.clock.now_s + delay_s,
                n_output=arrival.n_output,
                n_prompt=arrival.n_prompt,
                account=None if arrival.account is None else arrival.account.name,
            )
        )
