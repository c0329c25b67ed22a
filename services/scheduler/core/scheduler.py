"""Iteration-level scheduling (Orca, Algorithm 1): selects a batch, and later applies the tokens
that the batch produced.

In the paper's algorithm, `select` is lines 4 and 6 to 8, the limit of batches in `select` is line
9, and `apply` is lines 11 to 15. Lines 5 and 10 are the serving loop, which decides when each
method is called. Lines 17 to 28 are the policy, which decides which requests are chosen.

Some cases are not described in the paper. If no request can run, there is no batch. A request that
can never fit is refused on arrival. A request that is cancelled while it runs ends when a batch
with the request returns. The paper's engine does not fail: here a scheduler lives as long as its
epoch, and the pool is passed on to the scheduler of the next epoch. Requests of a pipeline that is
late go on in other pipelines (`release_late`), and the late pipeline may come back.

One feature goes beyond the paper: with `token_hand_off`, a request joins the next iteration before
the last one has returned. The plan of that iteration then omits the request's last token, which the
rank that sampled the token still has. If that token ends the request, the tokens that later batches
produce for the request are discarded, and its memory is freed when the last of these batches has
returned. Without `token_hand_off`, and with prompts that run as a whole, a request is in at most
one batch, as in the paper.

Optional features are separate objects: drafts of tokens (`drafting/`) and preemption
(`preemption/`). Where a feature is off, an object that does nothing takes its place.
"""

from collections.abc import Mapping, Sequence

from services.scheduler.core import complete_kv
from services.scheduler.core.admission import suspects
from services.scheduler.core.admission.feasible import check_feasible
from services.scheduler.core.admission.grammar_gate import DueGrammar
from services.scheduler.core.batch import Batch, Span, Update, span_of, update_of
from services.scheduler.core.batches_in_flight import BatchesInFlight
from services.scheduler.core.drafting.drafter import Drafter
from services.scheduler.core.drafting.drafting import drafting_of
from services.scheduler.core.logprob_updates import with_logprobs
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.memory.reservation import Reservation
from services.scheduler.core.pipeline_room import PipelineRoom
from services.scheduler.core.policies import Policy
from services.scheduler.core.preemption.for_departure import ForDeparture
from services.scheduler.core.preemption.preemption import Preemptions, preemption_of
from services.scheduler.core.request import FinishReason, Request, RequestState
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.span_logprobs import NO_LOGPROBS, SpanLogprobs

# Looking up an enum member takes as long as a method call, and would be done for each token.
_FINISHED = RequestState.FINISHED


class Scheduler:
    """The scheduler of Algorithm 1. At most `pipeline_depth` batches are in flight: the paper's
    `n_workers`, by default the number of stages, and two with one stage. `token_hand_off` says that
    the ranks which embed tokens are also the ranks which sample tokens, so that these ranks have
    the last token of every request.
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
        build: str = "",
    ) -> None:
        if pipeline_depth < 1:
            raise ValueError(f"pipeline_depth must be at least 1, not {pipeline_depth}")
        self.pool = pool
        self.pool.build = build
        self.kv_manager = kv_manager
        self.policy = policy
        self.pipeline_depth = pipeline_depth
        self.token_hand_off = token_hand_off
        self.drafter = drafter
        self._max_running = policy.max_batch_size * (1 if token_hand_off else pipeline_depth)
        self._can_run = Request.can_run_ahead if token_hand_off else Request.can_run
        self._drafting = drafting_of(drafter, kv_manager, token_hand_off=token_hand_off)
        self._preemption = preemption_of(
            pool, kv_manager, policy, can_run=self._can_run, preempt=self._preempt
        )
        self._departure = ForDeparture(pool, preempt=self._preempt)
        self._in_flight = BatchesInFlight()
        self._n_iterations = 0
        self.n_returned = 0
        """Number of batches that have returned; the last one had this number, too."""
        self._released_rows: list[int] = []
        self._preempted: list[Request] = []

    @property
    def n_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def n_reserved_slots(self) -> int:
        return self.kv_manager.n_reserved_slots

    @property
    def is_draining(self) -> bool:
        """Whether the pipeline is to end and leaves its requests to other pipelines."""
        return self._departure.has_begun

    @property
    def has_left(self) -> bool:
        """Whether the pipeline drains, and no request runs in it or needs it: its epoch can end."""
        return not self.n_in_flight and self._departure.is_over

    def submit(self, request: Request) -> None:
        """Puts a request into the pool.

        Raises:
            InvalidRequest: the request could never run, not even alone.
            PoolFull: the pool has no room for it now.
        """
        check_feasible(request, self.kv_manager, self.pool)
        self.pool.add(request)

    def select(self) -> Batch | None:
        """Returns the next batch to run. Returns None if no request can run, if `pipeline_depth`
        batches are in flight, or if drafting needs all batches in flight to return first."""
        is_full = len(self._in_flight) == self.pipeline_depth
        if is_full or (self._in_flight and self._drafting.awaits):
            return None
        self._preemption.prepare()
        selections = self.policy.select(self.pool, self.kv_manager)
        if not selections:
            return None
        self._n_iterations += 1
        n_drafts = self._drafting.draft(selections)
        batch = Batch(
            iteration=self._n_iterations,
            spans=tuple([self._schedule(one, n, memory) for one, n, memory in selections]),
            released_rows=tuple(self._released_rows),
            n_drafts=n_drafts,
            cache_changes=self.kv_manager.prefix_cache.take_changes(),
        )
        self._preemption.settle(batch.columns.requests)
        self.pool.mark_running(batch.columns.requests, can_run=self._can_run)
        self._released_rows.clear()
        self._in_flight.add(batch)
        return batch

    def apply(
        self,
        iteration: int,
        token_ids: Sequence[int],
        logprobs: Mapping[int, SpanLogprobs] = NO_LOGPROBS,
        *,
        cut: Sequence[int] = (),
        broken: Sequence[int] = (),
    ) -> list[Update]:
        """Applies the tokens that a batch produced: one for each sampled span and each draft, in
        order. Returns the resulting updates. `logprobs` has log-probabilities by the index of a
        span in the batch; the update of the span's request gets them. `cut` lists the indices,
        among the tokens, of tokens that end an output before its grammar is complete. `broken`
        lists the indices of spans for which the model computed numbers that are not finite. The
        requests of these spans fail.

        Raises:
            ValueError: the iteration is not the oldest in flight, or the number of tokens is wrong.
        """
        batch = self._in_flight.take(iteration, len(token_ids))
        self.n_returned = iteration
        self.pool.is_late = False
        for request in batch.sampled_requests(cut):
            request.is_cut = True
        for place in broken:
            request = batch.spans[place].request
            request.is_broken = True
            self.kv_manager.blocks.forget(request)
        drafted: list[Update] = []
        if len(token_ids) == len(batch.spans) and not batch.n_drafts:  # usual
            updates = list(map(self._apply_to, batch.columns.requests, token_ids))
        else:
            tokens = iter(token_ids)
            updates = [
                self._apply_to(span.request, self._drafting.last_token(span, tokens, drafted))
                for span in batch.spans
            ]
        self._drafting.note_returned(batch, self._in_flight.all())
        for place, brought in logprobs.items():
            updates[place] = with_logprobs(batch.spans[place].request, updates[place], brought)
        return [*drafted, *[update for update in updates if update is not None]]

    def cancel(self, request: Request) -> list[Update]:
        """Cancels a request. A running request ends when its next batch returns, any other request
        at once. Returns the update that ends the request now, if there is one."""
        if request.state is RequestState.FINISHED:
            return []
        if request.state is RequestState.RUNNING:
            request.is_cancelled = True
            self.pool.hold_back(request)
            return []
        return [self._finish(request, FinishReason.CANCELLED)]

    def expire(self, now: float) -> list[Update]:
        """Ends the waiting requests whose deadlines have passed, or will pass before the requests
        can begin. Returns the updates that end these requests."""
        return [self._finish(request, FinishReason.TIMED_OUT) for request in self.pool.expired(now)]

    def give_up(self, request: Request, message: str) -> list[Update]:
        """Fails a request that waits and that the current epoch cannot serve. Returns the update
        that ends the request, with `message` as the reason."""
        return [self._finish(request, FinishReason.FAILED, message=message)]

    def next_grammar(self) -> DueGrammar | None:
        """Returns a grammar that the ranks must compile now, while iterations go on, or None. Once
        the ranks have compiled the grammar, `note_grammar` must be called."""
        return self.pool.next_grammar()

    def note_grammar(self, digest: bytes, failure: str = "") -> list[Update]:
        """Notes that the ranks have tried to compile the grammar with the digest `digest`.
        `failure` is the reason why the grammar cannot be compiled, or empty. After a failure, the
        requests that wait for the grammar fail. Returns the updates that end these requests."""
        if not failure:
            self.pool.grammars.note_compiled(digest)
            return []
        self.pool.grammars.note_failed()
        message = f"grammar: cannot be followed: {failure}"
        waiting = self.pool.shared.stranded_by(digest)
        return [self._finish(request, FinishReason.FAILED, message=message) for request in waiting]

    def adopt(self) -> list[Update]:
        """Begins to admit requests of the pool, which may have requests of earlier epochs. A
        request fails if it fits neither into the memory of this epoch nor into the memory of
        another pipeline. Returns the updates that end the failed requests."""
        room = PipelineRoom(self.pool, self.kv_manager, self._max_running)
        self.pool.shared.open(self.pool, room, self.kv_manager.blocks)
        self.pool.shared.wake_others(self.pool)
        return [
            self._finish(request, FinishReason.FAILED, message="the K/V memory became too small")
            for request in list(self.pool)
            if not self.kv_manager.fits_ever(request.max_sequence_len)
            and not self.pool.shared.placement.fits_elsewhere(self.pool, request)
        ]

    def drain(self, *, is_last: bool = False) -> None:
        """Prepares the end of this pipeline: waiting requests are left to other pipelines, and
        running requests move to other pipelines if that costs less than waiting for their ends
        (`for_departure.py`). If there is no other pipeline, this pipeline goes on. With `is_last`,
        all requests wait for other pipelines as soon as their batches have returned."""
        if not self._departure.has_begun:
            self._preemption = Preemptions([self._preemption, self._departure])
        self._departure.begin(is_last=is_last)

    def release_late(self) -> tuple[list[Request], list[Update]]:
        """Lets the running requests wait again for other pipelines, because a batch in flight is
        late. This pipeline admits no request until it returns a batch.

        Each request continues only in the pipeline that admits it next. Results of batches in
        flight are discarded for a released request, and its memory is freed when these batches have
        returned. Its keys and values then stay in the prefix cache. So if this pipeline admits the
        request again, it computes little more than the discarded tokens. Requests that may be the
        cause of the delay are not released (`may_move`).

        Returns the requests that wait again, and the updates of cancelled requests, which end.
        """
        self.pool.is_late = True
        cancelled = [request for request in self.pool.running if request.is_cancelled]
        ends = [self._finish(request, FinishReason.CANCELLED) for request in cancelled]
        moved = [request for request in self.pool.running if request.may_move]
        left = {request: request.left_behind() for request in moved if request.n_in_flight}
        self._in_flight.replace(left)
        for request in moved:
            request.was_late = True
            self._release_if_unused(request)
            self._preemption.note_preempted(request)
        self.pool.release(moved)
        return moved, ends

    def suspend(
        self, iteration: int = 0, *, is_by_itself: bool = False
    ) -> tuple[list[Request], list[Update]]:
        """Lets all requests wait again, because the epoch is over. From then on the prefix cache
        has all complete keys and values (`complete_kv.py`), for a later epoch that takes it over.
        `is_by_itself` says that a rank failed without a cause from outside. `iteration` is the
        iteration that the rank computed, or 0 if that is not known. The requests of this iteration,
        or else all requests in flight, become suspects (`suspects.py`). Returns the requests that
        had begun, and the updates of requests that end, cancelled or failed."""
        computed = self._in_flight.get(iteration)
        held = self.pool.running if computed is None else computed.columns.requests
        suspects.suspect([one for one in held if one.n_in_flight], is_by_itself=is_by_itself)
        complete_kv.retire_all(self.pool.running, self._in_flight.all(), self.kv_manager)
        self._in_flight.clear()
        self.pool.shared.close(self.pool)
        begun = self.pool.preempt_all()
        ends = []
        for request in begun:
            if request.is_cancelled:
                ends.append(self._finish(request, FinishReason.CANCELLED))
            elif message := suspects.verdict(request):
                ends.append(self._finish(request, FinishReason.FAILED, message=message))
        return begun, ends

    def resume(self, earlier: "Scheduler") -> None:
        """Takes over the prefix cache of a suspended core. Call it before `adopt`, and only if the
        ranks still have the keys and values of that core's epoch.

        Raises:
            ValueError: the K/V memory of the earlier epoch is of another kind.
        """
        self.kv_manager.take_over(earlier.kv_manager)

    def learn_overhead(self, n_tokens: int) -> bool:
        """Sets the fixed time of an iteration that the policy assumes: the time of `n_tokens`
        prompt tokens. Returns whether the value has changed."""
        return self.policy.prompt_groups.learn_overhead(n_tokens)

    def take_preempted(self) -> list[Request]:
        """Returns the requests that were preempted since the last call."""
        taken, self._preempted = self._preempted, []
        return taken

    def _schedule(self, request: Request, n_tokens: int, reservation: Reservation) -> Span:
        start, n_known, drafts = request.n_scheduled, request.n_tokens, request.drafts
        end = start + n_tokens
        n_drafts = len(drafts) if drafts else 0  # usually empty; this saves a call for each token
        is_sampled = end == n_known + request.n_awaited and request.max_new_tokens > 0
        is_admission = request.reservation is None
        request.n_scheduled = end
        request.n_awaited += is_sampled
        request.n_in_flight += 1
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
        # An awaited token is the last of the sequence, so its span has no other token.
        token_ids: Sequence[int] = request.span(start, n_tokens) if start < n_known else ()
        return span_of(
            (
                request,
                start,
                n_tokens + n_drafts,
                [*token_ids, *drafts] if drafts else token_ids,
                is_admission,
                is_sampled,
                new_block_ids,
                n_drafts,
            )
        )

    def _apply_to(self, request: Request, token_id: int | None) -> Update | None:
        """Applies the last token that a span of a request produced. `token_id` is None if no token
        was sampled after the span. Returns the update, or None if nothing is to be reported."""
        request.n_in_flight -= 1
        request.n_awaited -= token_id is not None
        if request.state is _FINISHED:
            self._release_if_unused(request)
            return None
        if request.is_cancelled:
            return self._finish(request, FinishReason.CANCELLED)
        if request.is_broken:
            return self._finish(request, FinishReason.FAILED, message=suspects.NOT_FINITE)
        reason = None if token_id is None else request.accept(token_id)
        if token_id is None and request.wants_vector:
            reason = None if request.n_in_flight or request.can_run() else FinishReason.STOP
        if reason is not None:
            return self._finish(request, reason, token_id)
        if not request.n_in_flight:
            if self._preemption.is_due(request):
                self._preempt(request)
            else:
                self.pool.mark_returned(request)
        if token_id is None:
            return None
        n_generated = request.n_tokens - request.n_prompt_tokens
        return update_of((request, token_id, None, n_generated, "", None))

    def _preempt(self, request: Request) -> None:
        """Preempts a request that is in no batch: the request waits again, and its memory is free
        for other requests."""
        self._release_if_unused(request)
        self.pool.preempt(request)
        request.n_preemptions += 1
        self._preempted.append(request)
        self._preemption.note_preempted(request)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        token_id: int | None = None,
        *,
        message: str = "",
    ) -> Update:
        self.pool.remove(request)
        self._preemption.note_end(request)
        self._release_if_unused(request)
        return Update(request, token_id, reason, len(request.generated_token_ids), message)

    def _release_if_unused(self, request: Request) -> None:
        if request.reservation is not None and not request.n_in_flight:
            self._released_rows.append(request.reservation.row)
            if request.is_broken:
                self.kv_manager.discard(request, request.reservation)
            else:
                self.kv_manager.retire(request, request.reservation)
            request.reservation = None
            self._preemption.note_freed(request)
