"""Iteration-level scheduling (Orca, Algorithm 1): select a batch, and later apply what it produced.

Lines of the paper's algorithm: `select` is 4 and 6 to 8, the limit in it is 9, `apply` is 11 to
15. Who waits for whom is the serving loop's business, who is chosen is the policy's.

Where the paper is silent: an empty batch is no batch; a request that can never fit is refused on
arrival; a request cancelled while it runs ends when its batch returns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.errors import InvalidRequest
from services.scheduler.batch import Batch, Span
from services.scheduler.kv_manager import KVManager
from services.scheduler.policies import Policy, Selection
from services.scheduler.request import FinishReason, Request, RequestState
from services.scheduler.request_pool import RequestPool


@dataclass(frozen=True, slots=True)
class Update:
    """What an iteration, or a cancellation, brought a request."""

    request: Request
    token_id: int | None
    finish_reason: FinishReason | None


class Scheduler:
    """Keeps at most `pipeline_depth` batches in flight, and each request in at most one of them."""

    def __init__(
        self, pool: RequestPool, kv_manager: KVManager, *, policy: Policy, pipeline_depth: int
    ) -> None:
        if pipeline_depth < 1:
            raise ValueError(f"pipeline_depth must be at least 1, not {pipeline_depth}")
        self.pool = pool
        self.kv_manager = kv_manager
        self.pipeline_depth = pipeline_depth
        self._policy = policy
        self._in_flight: dict[int, Batch] = {}
        self._n_iterations = 0
        self._released_rows: list[int] = []

    @property
    def n_in_flight(self) -> int:
        return len(self._in_flight)

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
        if not self.kv_manager.fits_ever(request.max_tokens):
            raise InvalidRequest(
                "max_tokens",
                f"{request.n_prompt_tokens} prompt tokens and {request.max_new_tokens} new ones "
                f"need more than the {self.kv_manager.n_slots} K/V slots there are",
            )
        self.pool.add(request)

    def cancel(self, request: Request) -> Update | None:
        """Ends a request, at once unless it is running; None if its end is still to come or is
        past."""
        if request.state is RequestState.FINISHED:
            return None
        if request.state is RequestState.RUNNING:
            request.is_cancelled = True
            return None
        return self._finish(request, FinishReason.CANCELLED)

    def select(self) -> Batch | None:
        """The next batch to run, or None if there is none or enough are in flight."""
        if len(self._in_flight) == self.pipeline_depth:
            return None
        selections = self._policy.select(self.pool, self.kv_manager)
        if not selections:
            return None
        self.pool.mark_running(selection.request for selection in selections)
        self._n_iterations += 1
        batch = Batch(
            iteration=self._n_iterations,
            spans=tuple(self._schedule(selection) for selection in selections),
            released_rows=tuple(self._released_rows),
        )
        self._released_rows.clear()
        self._in_flight[batch.iteration] = batch
        return batch

    def apply(self, iteration: int, token_ids: Sequence[int]) -> list[Update]:
        """Takes the tokens that a batch produced, one per sampled span, in order.

        Raises:
            ValueError: the iteration is not the oldest in flight, or the tokens do not match it.
        """
        batch = self._return(iteration, len(token_ids))
        tokens = iter(token_ids)
        updates = (
            self._apply_span(span, next(tokens) if span.is_sampled else None)
            for span in batch.spans
        )
        return [update for update in updates if update is not None]

    def _schedule(self, selection: Selection) -> Span:
        request, n_tokens = selection.request, selection.n_tokens
        start = request.n_scheduled
        is_admission = request.reservation is None
        request.reservation = selection.reservation
        request.n_scheduled = start + n_tokens
        return Span(
            request=request,
            start_position=start,
            token_ids=request.span(start, n_tokens),
            is_admission=is_admission,
            is_sampled=request.n_scheduled == request.n_tokens,
            new_block_ids=self.kv_manager.allocate(selection.reservation, request.n_scheduled),
        )

    def _return(self, iteration: int, n_tokens: int) -> Batch:
        oldest = next(iter(self._in_flight), None)
        if iteration != oldest:
            raise ValueError(
                f"iteration {iteration} returned, but {oldest} is the oldest in flight"
            )
        batch = self._in_flight.pop(iteration)
        n_sampled = sum(span.is_sampled for span in batch.spans)
        if n_tokens != n_sampled:
            raise ValueError(
                f"iteration {iteration} returned {n_tokens} tokens for {n_sampled} spans"
            )
        return batch

    def _apply_span(self, span: Span, token_id: int | None) -> Update | None:
        request = span.request
        if request.is_cancelled:
            return self._finish(request, FinishReason.CANCELLED)
        reason = None if token_id is None else request.accept(token_id)
        if reason is not None:
            return self._finish(request, reason, token_id)
        self.pool.mark_returned(request)
        return None if token_id is None else Update(request, token_id, None)

    def _finish(
        self, request: Request, reason: FinishReason, token_id: int | None = None
    ) -> Update:
        self.pool.remove(request)
        if request.reservation is not None:
            self._released_rows.append(request.reservation.row)
            self.kv_manager.release(request.reservation)
            request.reservation = None
        return Update(request, token_id, reason)
