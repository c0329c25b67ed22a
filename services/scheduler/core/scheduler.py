"""Iteration-level scheduling (Orca, Algorithm 1): select a batch, and later apply what it produced.

Lines of the paper's algorithm: `select` is 4 and 6 to 8, the limit in it is 9, `apply` is 11 to
15. Who waits for whom is the serving loop's business, who is chosen is the policy's.

Where the paper is silent: an empty batch is no batch; a request that can never fit is refused on
arrival; a request cancelled while it runs ends when a batch of it returns. The paper's engine does
not fail: here a scheduler lives as long as its epoch, and the pool goes on to the next one's.

Where it goes further: with `token_hand_off`, a request rides the next iteration before the last one
has returned. Its token is left out of the plan then, since the rank that sampled it still has it.
If that token turns out to end the request, what later batches bring is thrown away, and its memory
is free when the last of them has returned. Without it, and with whole prompts, a request is in at
most one batch, as in the paper.

With a `Drafter`, a decode may carry drafts, and bring several tokens (`drafting.py`).
"""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from services.common.errors import InvalidRequest
from services.common.named_tuples import maker
from services.scheduler.core.batch import Batch, Span, SpanLogprobs, span_of
from services.scheduler.core.drafting.drafting import NO_DRAFTS, Drafting
from services.scheduler.core.drafting.drafts import Drafter
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.memory.reservation import Reservation
from services.scheduler.core.order.fair import Fair
from services.scheduler.core.policies import Policy
from services.scheduler.core.preemption.for_fairness import GivingWay
from services.scheduler.core.preemption.for_memory import Lending
from services.scheduler.core.request import (
    MAX_LOSSES,
    FinishReason,
    Request,
    RequestId,
    RequestState,
)
from services.scheduler.core.request_pool import RequestPool

NO_LOGPROBS: Mapping[int, SpanLogprobs] = MappingProxyType({})


class Update(NamedTuple):
    """The effect of an iteration, or of a cancellation, on one request. An iteration with drafts of
    a request may have several, one for each token."""

    request: Request
    token_id: int | None
    finish_reason: FinishReason | None
    n_generated: int
    """Tokens of the output, up to and including this one."""
    message: str = ""
    """Why the request failed, for people."""
    logprobs: SpanLogprobs | None = None
    """The log-probabilities that the request wants; there may be some of its prompt without a
    token."""


update_of = maker(Update)
"""Makes an update of its fields."""

# To look a member of an enum up takes as long as to call a method; here it is done for each token.
_FINISHED = RequestState.FINISHED


class Scheduler:
    """The scheduler of Algorithm 1; it keeps at most `pipeline_depth` batches in flight.

    `token_hand_off` says that the ranks which embed tokens are those that sample them, and know the
    last one of every request.
    """

    def __init__(
        self,
        pool: RequestPool,
        kv_manager: KVManager,
        *,
        policy: Policy,
        pipeline_depth: int,
        token_hand_off: bool = False,
        drafter: Drafter | None = None,
    ) -> None:
        if pipeline_depth < 1:
            raise ValueError(f"pipeline_depth must be at least 1, not {pipeline_depth}")
        self.pool = pool
        self.pool.grammar_turns.forget()
        self.kv_manager = kv_manager
        self.pipeline_depth = pipeline_depth
        self.token_hand_off = token_hand_off
        self.drafter = drafter
        self._drafting: Drafting | None = None
        if drafter is not None:
            self._drafting = Drafting(drafter, kv_manager, token_hand_off=token_hand_off)
        self.policy = policy
        self._can_run = Request.can_run_ahead if token_hand_off else Request.can_run
        self._in_flight: dict[int, Batch] = {}
        self._n_iterations = 0
        self._released_rows: list[int] = []
        self._lending: Lending | None = None
        if kv_manager.expected_use is not None:
            self._lending = Lending(
                pool, kv_manager, can_run=self._can_run, put_down=self._put_down
            )
        self._giving_way: GivingWay | None = None
        if isinstance(pool.order, Fair):
            self._giving_way = GivingWay(
                pool,
                pool.order,
                kv_manager,
                policy,
                can_run=self._can_run,
                put_down=self._put_down,
            )
        self._put_down_for_memory: list[Request] = []

    @property
    def n_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def n_reserved_slots(self) -> int:
        return self.kv_manager.n_reserved_slots

    def submit(self, request: Request) -> None:
        """Puts a request into the pool.

        Raises:
            InvalidRequest: it could not even run alone.
            PoolFull: it must wait outside.
        """
        if not request.prompt_token_ids:
            raise InvalidRequest("prompt", "must have at least one token")
        if request.max_new_tokens < 1:
            raise InvalidRequest("max_tokens", "must be at least 1")
        if len(request.generated_token_ids) >= request.max_new_tokens:
            raise InvalidRequest("max_tokens", "leaves nothing to generate")
        if not self.kv_manager.fits_ever(request.max_sequence_len):
            raise InvalidRequest(
                "max_tokens",
                f"{request.n_prompt_tokens} prompt tokens and {request.max_new_tokens} new ones "
                f"need more than the {self.kv_manager.max_sequence_len} K/V slots that one request "
                "can have",
            )
        if not self.pool.fits_ever(request):
            raise InvalidRequest(
                "max_tokens",
                f"{request.n_prompt_tokens} prompt tokens, {request.max_new_tokens} new ones and "
                f"{len(request.sampling)} bytes of options exceed the {self.pool.max_tokens} that "
                "all requests may have together",
            )
        self.pool.add(request)

    def adopt(self) -> list[Update]:
        """Takes over what the pool has from the epoch before; returns the ends of requests that
        this memory is too small for."""
        return [
            self._finish(request, FinishReason.FAILED, message="the K/V memory became too small")
            for request in list(self.pool)
            if not self.kv_manager.fits_ever(request.max_sequence_len)
        ]

    def suspend(self, culprits: Collection[RequestId] = ()) -> tuple[list[Request], list[Update]]:
        """Puts down all requests, since the epoch is over and their keys and values with it; they
        stay in the pool.

        `culprits` are those that are known to have ended it. If none are, those that were on board
        of a batch are suspects from now on; only the unproven ones, if there were any. Returns the
        requests that had begun, and the ends of those that were cancelled, are culprits or have
        been on board of too many losses.
        """
        on_board = [request for request in self.pool.running if request.n_in_flight]
        for request in [one for one in on_board if one.is_suspect] or on_board:
            request.n_losses += not culprits
        self._in_flight.clear()
        begun = self.pool.put_back()
        ends = [self._end_of_suspended(request, culprits) for request in begun]
        return begun, [end for end in ends if end is not None]

    def cancel(self, request: Request) -> list[Update]:
        """Ends a request, at once unless it is running. Returns its end; nothing if that is still
        to come or is past."""
        if request.state is RequestState.FINISHED:
            return []
        if request.state is RequestState.RUNNING:
            request.is_cancelled = True
            self.pool.hold_back(request)
            return []
        return [self._finish(request, FinishReason.CANCELLED)]

    def expire(self, now: float) -> list[Update]:
        """Ends the requests whose deadlines have come before they were admitted."""
        return [self._finish(request, FinishReason.TIMED_OUT) for request in self.pool.expired(now)]

    def give_up(self, request: Request, message: str) -> list[Update]:
        """Ends a request that has not begun in this epoch, which could not serve it; returns its
        end."""
        return [self._finish(request, FinishReason.FAILED, message=message)]

    def select(self) -> Batch | None:
        """Returns the next batch to run; None if there is none or enough are in flight."""
        if len(self._in_flight) == self.pipeline_depth:
            return None
        if self._drafting is not None and self._drafting.awaits and self._in_flight:
            return None
        if self._lending is not None:
            self._lending.make_room()
        if self.kv_manager.n_evicted_blocks:  # before, nothing is lost by waiting
            self.pool.order.prefer(self.kv_manager.n_cached_columns)
        if self._giving_way is not None:
            self._giving_way.make_way()
        selections = self.policy.select(self.pool, self.kv_manager)
        if not selections:
            return None
        self._n_iterations += 1
        drafts = NO_DRAFTS if self._drafting is None else self._drafting.draft(selections)
        if drafts:
            spans = [
                self._schedule(*chosen, drafts.get(chosen.request, ())) for chosen in selections
            ]
        else:
            spans = [self._schedule(*chosen) for chosen in selections]
        batch = Batch(
            iteration=self._n_iterations,
            spans=tuple(spans),
            released_rows=tuple(self._released_rows),
            n_drafts=sum([len(draft) for draft in drafts.values()]),
        )
        if self._giving_way is not None:
            self._giving_way.settle(batch.columns.requests)
        self.pool.mark_running(batch.columns.requests, can_run=self._can_run)
        self._released_rows.clear()
        self._in_flight[batch.iteration] = batch
        return batch

    def learn_overhead(self, n_tokens: int) -> bool:
        """Takes in that an iteration costs as much as so many tokens of prompts besides its own;
        returns whether that is news to the policy."""
        groups = self.policy.prompt_groups
        if groups is None or groups.overhead_tokens == n_tokens:
            return False
        groups.overhead_tokens = n_tokens
        return True

    def take_put_down(self) -> list[Request]:
        """Returns the requests that were put down for the memory of others since the last call."""
        taken, self._put_down_for_memory = self._put_down_for_memory, []
        return taken

    def apply(
        self,
        iteration: int,
        token_ids: Sequence[int],
        logprobs: Mapping[int, SpanLogprobs] = NO_LOGPROBS,
        *,
        cut: Sequence[int] = (),
    ) -> list[Update]:
        """Takes the tokens that a batch produced, one per sampled span and draft, in order, and
        returns the updates. `logprobs` are by the place of their span in the batch; they are passed
        on. `cut` has the places of tokens that end an output before its grammar ends.

        Raises:
            ValueError: the iteration is not the oldest in flight, or the tokens do not match it.
        """
        batch = self._return(iteration, len(token_ids))
        if cut:
            sampled = [
                span.request for span in batch.spans for _ in range(span.is_sampled + span.n_drafts)
            ]
            for place in cut:
                sampled[place].is_cut = True
        drafted: list[Update] = []
        if len(token_ids) == len(batch.spans) and not batch.n_drafts:  # nearly always
            updates = list(map(self._apply_to, batch.columns.requests, token_ids))
        else:
            tokens = iter(token_ids)
            updates = [
                self._apply_drafts(span, self._drafting.right_tokens(span, tokens), drafted)
                if span.n_drafts and self._drafting is not None
                else self._apply_to(span.request, next(tokens) if span.is_sampled else None)
                for span in batch.spans
            ]
        if self._drafting is not None:
            self._drafting.note_returned(batch, self._in_flight.values())
        if logprobs:
            for place, brought in logprobs.items():
                updates[place] = self._with_logprobs(batch.spans[place], updates[place], brought)
        return [*drafted, *[update for update in updates if update is not None]]

    def _schedule(
        self,
        request: Request,
        n_tokens: int,
        reservation: Reservation,
        draft: Sequence[int] = (),
    ) -> Span:
        start, n_known = request.n_scheduled, request.n_tokens
        end = start + n_tokens
        is_sampled = end == n_known + request.n_awaited
        is_admission = request.reservation is None
        if is_admission and request.grammar_digest is not None:
            self.pool.grammar_turns.admit(request.grammar_digest)
        request.n_scheduled = end
        request.n_awaited += is_sampled
        request.n_in_flight += 1
        request.n_drafts = n_drafts = len(draft) if draft else 0
        new_block_ids: Sequence[int] = ()
        if end + n_drafts > reservation.n_block_slots:
            new_block_ids = self.kv_manager.allocate(
                reservation,
                end + n_drafts,
                start=start,
                n_unscheduled=request.n_prefill_tokens - start,
            )
        if is_admission:
            request.reservation = reservation
            request.n_cached_tokens = start
            new_block_ids = self.kv_manager.blocks_of(reservation)
        if end >= reservation.next_entry_at:
            self.kv_manager.enter(request, reservation)
        # A token that has not come back is the last of the sequence, so it is a span by itself.
        token_ids: Sequence[int] = request.span(start, n_tokens) if start < n_known else ()
        return span_of(
            (
                request,
                start,
                n_tokens + n_drafts,
                [*token_ids, *draft] if draft else token_ids,
                is_admission,
                is_sampled,
                new_block_ids,
                n_drafts,
            )
        )

    def _return(self, iteration: int, n_tokens: int) -> Batch:
        oldest = next(iter(self._in_flight), None)
        if iteration != oldest:
            raise ValueError(
                f"iteration {iteration} returned, but {oldest} is the oldest in flight"
            )
        batch = self._in_flight.pop(iteration)
        n_sampled = batch.n_sampled + batch.n_drafts
        if n_tokens != n_sampled:
            raise ValueError(
                f"iteration {iteration} returned {n_tokens} tokens for {n_sampled} spans"
            )
        return batch

    def _apply_drafts(
        self, span: Span, token_ids: Sequence[int], updates: list[Update]
    ) -> Update | None:
        """Takes the tokens that a span with drafts brought; adds to `updates` all but the last,
        which it returns."""
        request = span.request
        request.n_drafts = 0
        if request.state is RequestState.FINISHED or request.is_cancelled:
            return self._apply_to(request, token_ids[0])
        for token_id in token_ids[:-1]:
            if token_id in request.stop_token_ids:
                return self._apply_to(request, token_id)
            request.accept(token_id)
            request.n_scheduled += 1  # where the draft of it was
            updates.append(Update(request, token_id, None, len(request.generated_token_ids)))
        return self._apply_to(request, token_ids[-1])

    def _apply_to(self, request: Request, token_id: int | None) -> Update | None:
        """Takes the last token that a span of a request brought; None if it was to bring none."""
        request.n_in_flight -= 1
        request.n_awaited -= token_id is not None
        if request.state is _FINISHED:
            self._release_if_unused(request)
            if self._lending is not None and not request.n_in_flight:
                self._lending.n_leaving -= 1
            return None
        if request.is_cancelled:
            return self._finish(request, FinishReason.CANCELLED)
        reason = None if token_id is None else request.accept(token_id)
        if reason is not None:
            return self._finish(request, reason, token_id)
        if not request.n_in_flight:
            self._note_returned(request)
        if token_id is None:
            return None
        n_generated = request.n_tokens - request.n_prompt_tokens
        return update_of((request, token_id, None, n_generated, "", None))

    def _note_returned(self, request: Request) -> None:
        """Notes that a request that goes on is in no batch."""
        if (self._lending is not None and self._lending.must_yield(request)) or (
            self._giving_way is not None and self._giving_way.must_leave(request)
        ):
            self._put_down(request)
        else:
            self.pool.mark_returned(request)

    def _put_down(self, request: Request) -> None:
        """Puts a request down for the memory of others."""
        self._release_if_unused(request)
        self.pool.put_down(request)
        request.n_put_downs += 1
        self._put_down_for_memory.append(request)
        if self._lending is not None:
            self._lending.forget(request)
        if self._giving_way is not None:
            self._giving_way.forget(request)

    def _with_logprobs(
        self, span: Span, update: Update | None, logprobs: SpanLogprobs
    ) -> Update | None:
        """Returns the update of a span with what it has brought besides."""
        request = span.request
        if update is None and request.state is not RequestState.FINISHED:
            update = Update(request, None, None, len(request.generated_token_ids))
        if update is None or update.finish_reason is FinishReason.CANCELLED:
            return update
        return update._replace(logprobs=logprobs)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        token_id: int | None = None,
        *,
        message: str = "",
    ) -> Update:
        self.pool.remove(request)
        if self._lending is not None:
            self._lending.forget(request)
            self._lending.n_leaving += request.n_in_flight > 0
        if self._giving_way is not None:
            self._giving_way.forget(request)
        if self.kv_manager.expected_use is not None and request.generated_token_ids:
            self.kv_manager.expected_use.learn(
                len(request.generated_token_ids), request.max_new_tokens
            )
        self._release_if_unused(request)
        return Update(request, token_id, reason, len(request.generated_token_ids), message)

    def _end_of_suspended(self, request: Request, culprits: Collection[RequestId]) -> Update | None:
        if request.is_cancelled:
            return self._finish(request, FinishReason.CANCELLED)
        if request.request_id in culprits:
            message = "the model's numbers for this request are not finite"
        elif request.n_losses >= MAX_LOSSES:
            message = f"the pipeline was lost {MAX_LOSSES} times in a row serving this request"
        else:
            return None
        return self._finish(request, FinishReason.FAILED, message=message)

    def _release_if_unused(self, request: Request) -> None:
        if request.reservation is not None and not request.n_in_flight:
            self.kv_manager.enter(request, request.reservation)
            self.kv_manager.enter_rest(request, request.reservation)
            self._released_rows.append(request.reservation.row)
            self.kv_manager.release(request.reservation)
            request.reservation = None
