"""A scheduling core that tells what it is told and what it decides.

It decides as `Scheduler` does. While nobody wants decisions, each call costs a look at that.
"""

from collections.abc import Collection, Mapping, Sequence

from orcinus.v1 import watch_pb2

from services.scheduler.core.batch import NO_LOGPROBS, Batch, SpanLogprobs, Update
from services.scheduler.core.drafting.drafter import Drafter
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.policies import Policy
from services.scheduler.core.request import Request, RequestId, RequestState
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.watching.core_facts import facts_of
from services.scheduler.watching.decisions import Decisions
from services.scheduler.watching.selections import selection_of


class WatchedScheduler(Scheduler):
    """A core whose decisions are told."""

    def __init__(
        self,
        pool: RequestPool,
        kv_manager: KVManager,
        *,
        policy: Policy,
        pipeline_depth: int,
        token_hand_off: bool = False,
        drafter: Drafter | None = None,
        decisions: Decisions,
    ) -> None:
        super().__init__(
            pool,
            kv_manager,
            policy=policy,
            pipeline_depth=pipeline_depth,
            token_hand_off=token_hand_off,
            drafter=drafter,
        )
        self._decisions = decisions
        self._number = decisions.n_cores
        decisions.n_cores += 1
        if decisions.are_wanted:
            facts = facts_of(self, is_first=self._number == 0)
            decisions.begin()
            decisions.tell(self._number, core="" if facts is None else facts.model_dump_json())

    def submit(self, request: Request) -> None:
        """Puts a request into the pool like `Scheduler.submit`."""
        self._decisions.begin()
        super().submit(request)
        if self._decisions.are_wanted:
            self._tell(submission=self._decisions.submission(request))

    def adopt(self) -> list[Update]:
        """Takes over the pool like `Scheduler.adopt`."""
        self._decisions.begin()
        updates = super().adopt()
        if self._decisions.are_wanted:
            self._tell(adoption=watch_pb2.AdoptionDecision())
        return updates

    def suspend(self, culprits: Collection[RequestId] = ()) -> tuple[list[Request], list[Update]]:
        """Puts all requests down like `Scheduler.suspend`."""
        if not self._decisions.are_wanted:
            return super().suspend(culprits)
        number = self._decisions.number
        numbers = [number(one) for one in self.pool.running if one.request_id in culprits]
        self._decisions.begin()
        result = super().suspend(culprits)
        self._tell(suspension=watch_pb2.SuspensionDecision(culprits=numbers))
        return result

    def cancel(self, request: Request) -> list[Update]:
        """Ends a request like `Scheduler.cancel`."""
        if not self._decisions.are_wanted or request.state is RequestState.FINISHED:
            return super().cancel(request)
        number = self._decisions.number(request)
        self._decisions.begin()
        updates = super().cancel(request)
        self._tell(cancellation=number)
        return updates

    def expire(self, now: float) -> list[Update]:
        """Ends requests whose time is up like `Scheduler.expire`."""
        self._decisions.begin()
        updates = super().expire(now)
        if updates and self._decisions.are_wanted:
            numbers = [self._decisions.number(update.request) for update in updates]
            self._tell(expiry=watch_pb2.ExpiryDecision(numbers=numbers))
        return updates

    def give_up(self, request: Request, message: str) -> list[Update]:
        """Ends a request like `Scheduler.give_up`."""
        self._decisions.begin()
        updates = super().give_up(request, message)
        if self._decisions.are_wanted:
            self._tell(surrender=self._decisions.number(request))
        return updates

    def select(self) -> Batch | None:
        """Returns the next batch like `Scheduler.select`."""
        if not self._decisions.are_wanted or self.n_in_flight == self.pipeline_depth:
            return super().select()
        self._decisions.begin()
        batch = super().select()
        self._tell(selection=selection_of(batch, self._decisions.number))
        return batch

    def apply(
        self,
        iteration: int,
        token_ids: Sequence[int],
        logprobs: Mapping[int, SpanLogprobs] = NO_LOGPROBS,
        *,
        cut: Sequence[int] = (),
    ) -> list[Update]:
        """Takes the tokens of a batch like `Scheduler.apply`."""
        self._decisions.begin()
        updates = super().apply(iteration, token_ids, logprobs, cut=cut)
        if self._decisions.are_wanted:
            tokens = self._decisions.tokens(token_ids)
            result = watch_pb2.ResultDecision(iteration=iteration, token_ids=tokens, cut=cut)
            self._tell(result=result)
        return updates

    def learn_overhead(self, n_tokens: int) -> bool:
        """Takes in what an iteration costs like `Scheduler.learn_overhead`."""
        self._decisions.begin()
        is_news = super().learn_overhead(n_tokens)
        if is_news and self._decisions.are_wanted:
            self._tell(overhead_tokens=n_tokens)
        return is_news

    def _tell(self, **decision: object) -> None:
        self._decisions.tell(self._number, **decision)
