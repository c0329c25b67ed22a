"""Drafting: decides which requests of a batch get drafts (`drafter.py`), and when the next batch
must wait for batches in flight.

A request gets a draft only when its last token is known. So with token hand-off, the next batch
waits for a batch in flight in two cases: a batch in flight has drafts, or a request of the batch
that just returned will get a draft once its next token is known. Drafts use free room in the batch
and in the memory that a request has already reserved. With optimistic admission, reservations grow
ahead for drafts while memory is free (`preemption/for_memory.py`).

A request that continues after a loss or a preemption gets its first token without drafts. That
token shows that the request runs again, and with the second token a suspect is cleared.
"""

from collections.abc import Collection, Iterator, Sequence

from services.scheduler.core.batch import Batch, Span, Update
from services.scheduler.core.drafting.drafter import SEARCHED_TOKENS, Drafter, n_leading_equal
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.policies import Selection
from services.scheduler.core.request import Request, RequestState


class NoDrafting:
    """Replacement for `Drafting` where no request has drafts."""

    awaits = False

    def draft(self, selections: Sequence[Selection]) -> int:
        """Returns 0, the number of drafts in the selected batch."""
        return 0

    def last_token(self, span: Span, token_ids: Iterator[int], updates: list[Update]) -> int | None:
        """Takes the sampled token of a span and returns it. Returns None if there is none."""
        return next(token_ids) if span.is_sampled else None

    def note_returned(self, batch: Batch, in_flight: Collection[Batch]) -> None:
        """Does nothing: no batch has drafts."""


class Drafting:
    """Gives drafts to the requests of each batch, and takes the tokens that verify the drafts."""

    def __init__(self, drafter: Drafter, kv_manager: KVManager, *, token_hand_off: bool) -> None:
        self.awaits = False
        """Whether the next batch is selected only when all batches in flight have returned."""
        self._drafter = drafter
        self._kv_manager = kv_manager
        self._token_hand_off = token_hand_off

    def draft(self, selections: Sequence[Selection]) -> int:
        """Gives drafts to the requests of the selected batch, as long as the batch has room.
        Returns the number of drafted tokens."""
        n_drafts = self._draft(selections)
        self.awaits = self._token_hand_off and n_drafts > 0
        return n_drafts

    def last_token(self, span: Span, token_ids: Iterator[int], updates: list[Update]) -> int | None:
        """Takes the sampled tokens of a span, and returns the last one that counts. Returns None if
        no token is sampled after the span.

        The tokens before the last one confirm drafts. They are appended to the request, and an
        update for each is added to `updates`.
        """
        if not span.n_drafts:
            return next(token_ids) if span.is_sampled else None
        *right, last = self._right_tokens(span, token_ids)
        request = span.request
        request.drafts = ()
        if _is_over(request):
            return last
        for token_id in right:
            if token_id in request.stop_token_ids:
                return token_id
            request.accept(token_id)
            request.n_scheduled += 1  # the token is stored where its draft was
            updates.append(Update(request, token_id, None, len(request.generated_token_ids)))
        return last

    def note_returned(self, batch: Batch, in_flight: Collection[Batch]) -> None:
        """Notes that the tokens of a batch are known. `in_flight` are the batches that have not
        returned."""
        self.awaits = self._token_hand_off and self._has_drafts_to_come(batch, in_flight)

    def _right_tokens(self, span: Span, token_ids: Iterator[int]) -> list[int]:
        """Takes the sampled tokens of a span with drafts, and learns how many drafts were right.
        Returns the tokens that decoding one by one would give: the tokens that confirm drafts, and
        one token more."""
        sampled = [next(token_ids) for _ in range(1 + span.n_drafts)]
        n_right = n_leading_equal(span.token_ids[-span.n_drafts :], sampled)
        request = span.request
        if request.speculation is not None and not _is_over(request):
            self._drafter.learn(request.speculation, span.n_drafts, n_right)
        return sampled[: n_right + 1]

    def _has_drafts_to_come(self, batch: Batch, in_flight: Collection[Batch]) -> bool:
        if not in_flight:
            return False
        if any(other.n_drafts for other in in_flight):
            return True
        drafter, n = self._drafter, len(batch.spans)
        # A draft found here is not used, since the awaited token must come before a draft. The
        # search only shows whether a draft is likely.
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
        """Returns a draft for a request, based on its known tokens. Returns an empty sequence if
        drafting does not pay."""
        speculation, drafter = request.speculation, self._drafter
        if speculation is None:
            return ()
        n_left = request.max_new_tokens - len(request.generated_token_ids) - 1
        length = min(speculation.length, n_left, n_room)
        if length < 1 or not drafter.pays(speculation, request.n_tokens, n_batch_tokens):
            return ()
        first = max(0, request.n_tokens - SEARCHED_TOKENS)
        return drafter.propose(request.packed_span(first, request.n_tokens - first), length)


def _is_over(request: Request) -> bool:
    """Returns whether further tokens of a request are discarded: it has ended, was cancelled, or
    its numbers are not finite."""
    return request.state is RequestState.FINISHED or request.is_cancelled or request.is_broken


def drafting_of(
    drafter: Drafter | None, kv_manager: KVManager, *, token_hand_off: bool
) -> Drafting | NoDrafting:
    """Returns a `Drafting` that uses the drafter, or a `NoDrafting` if the drafter is None."""
    if drafter is None:
        return NoDrafting()
    return Drafting(drafter, kv_manager, token_hand_off=token_hand_off)
