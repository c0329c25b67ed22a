"""Drafting: which requests of a batch have drafts (`drafter.py`), and which batches wait for that.

A request is drafted for only when its last token is known. So where tokens are handed off, a batch
whose requests have drafts to come is waited for, and so is one with drafts. Drafts take what room
there is in the batch and in the memory that a request has reserved; they ask for none.

A request that goes on after a loss, or after it was preempted, has its first token without drafts:
that token tells when it runs again, and with the second one a suspect has proved itself.
"""

from collections.abc import Collection, Iterator, Sequence

from services.scheduler.core.batch import Batch, Span, Update
from services.scheduler.core.drafting.drafter import SEARCHED_TOKENS, Drafter, n_leading_equal
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.policies import Selection
from services.scheduler.core.request import Request, RequestState


class NoDrafting:
    """No request has drafts."""

    awaits = False

    def draft(self, selections: Sequence[Selection]) -> int:
        """Returns the number of drafts in the batch that is selected."""
        return 0

    def last_token(self, span: Span, token_ids: Iterator[int], updates: list[Update]) -> int | None:
        """Takes the token of a span, and returns it; None if the span is not sampled."""
        return next(token_ids) if span.is_sampled else None

    def note_returned(self, batch: Batch, in_flight: Collection[Batch]) -> None:
        """Needs not know which batches have returned."""


class Drafting:
    """The drafts of one batch after the other."""

    def __init__(self, drafter: Drafter, kv_manager: KVManager, *, token_hand_off: bool) -> None:
        self.awaits = False
        """Whether the next batch waits for those in flight."""
        self._drafter = drafter
        self._kv_manager = kv_manager
        self._token_hand_off = token_hand_off

    def draft(self, selections: Sequence[Selection]) -> int:
        """Gives the requests of the batch that is selected drafts, as long as it has room for them;
        returns the number of drafts."""
        n_drafts = self._draft(selections)
        self.awaits = self._token_hand_off and n_drafts > 0
        return n_drafts

    def last_token(self, span: Span, token_ids: Iterator[int], updates: list[Update]) -> int | None:
        """Takes the tokens of a span, and returns the last one that counts; None if the span is not
        sampled. Its request takes the tokens before, which are as many as drafts were right; their
        updates are added to `updates`."""
        if not span.n_drafts:
            return next(token_ids) if span.is_sampled else None
        *right, last = self._right_tokens(span, token_ids)
        request = span.request
        request.drafts = ()
        if request.state is RequestState.FINISHED or request.is_cancelled:
            return last
        for token_id in right:
            if token_id in request.stop_token_ids:
                return token_id
            request.accept(token_id)
            request.n_scheduled += 1  # the token is stored where its draft was
            updates.append(Update(request, token_id, None, len(request.generated_token_ids)))
        return last

    def note_returned(self, batch: Batch, in_flight: Collection[Batch]) -> None:
        """Notes that the tokens of a batch are known; `in_flight` are the batches that have not
        returned."""
        self.awaits = self._token_hand_off and self._has_drafts_to_come(batch, in_flight)

    def _right_tokens(self, span: Span, token_ids: Iterator[int]) -> list[int]:
        """Takes the tokens of a span with drafts, and learns from them. Returns the tokens that
        would have come one by one without drafts: as many as drafts were right, and the one after
        them."""
        sampled = [next(token_ids) for _ in range(1 + span.n_drafts)]
        n_right = n_leading_equal(span.token_ids[-span.n_drafts :], sampled)
        request = span.request
        is_over = request.state is RequestState.FINISHED or request.is_cancelled
        if request.speculation is not None and not is_over:
            self._drafter.learn(request.speculation, span.n_drafts, n_right)
        return sampled[: n_right + 1]

    def _has_drafts_to_come(self, batch: Batch, in_flight: Collection[Batch]) -> bool:
        if not in_flight:
            return False
        if any(other.n_drafts for other in in_flight):
            return True
        drafter, n = self._drafter, len(batch.spans)
        # What is found here is not the draft: the token that is awaited belongs before it.
        return n < drafter.max_batch_tokens and any(
            self._draft_of(span.request, n, drafter.max_drafts)
            for span in batch.spans
            if span.is_sampled and span.request.state is RequestState.RUNNING
        )

    def _draft(self, selections: Sequence[Selection]) -> int:
        max_batch_tokens = self._drafter.max_batch_tokens
        if len(selections) >= max_batch_tokens:
            return 0
        n_tokens = sum([chosen.n_tokens for chosen in selections])
        n_most = n_free = max_batch_tokens - n_tokens
        if n_free <= 0:
            return 0
        for n_before, (request, _, reservation) in enumerate(selections):
            if request.n_awaited or request.n_unscheduled != 1 or not request.n_new_tokens:
                continue
            n_room = self._kv_manager.n_free_slots(reservation, request.n_tokens)
            n_share = -(-n_free // (len(selections) - n_before))
            request.drafts = self._draft_of(request, n_tokens, min(n_room, n_share))
            n_free -= len(request.drafts)
        return n_most - n_free

    def _draft_of(self, request: Request, n_batch_tokens: int, n_room: int) -> Sequence[int]:
        """Returns the draft of a request by the tokens that are known; none if it does not pay."""
        speculation, drafter = request.speculation, self._drafter
        if speculation is None:
            return ()
        n_left = request.max_new_tokens - len(request.generated_token_ids) - 1
        length = min(speculation.length, n_left, n_room)
        if length < 1 or not drafter.pays(speculation, request.n_tokens, n_batch_tokens):
            return ()
        first = max(0, request.n_tokens - SEARCHED_TOKENS)
        return drafter.propose(request.packed_span(first, request.n_tokens - first), length)


def drafting_of(
    drafter: Drafter | None, kv_manager: KVManager, *, token_hand_off: bool
) -> Drafting | NoDrafting:
    """Returns what drafts with a drafter; what drafts nothing without one."""
    if drafter is None:
        return NoDrafting()
    return Drafting(drafter, kv_manager, token_hand_off=token_hand_off)
