"""Drafting: which requests of a batch have drafts (`drafts.py`), and which batches wait for that.

A request is drafted for only when its last token is known. So where tokens are handed off, a batch
whose requests have drafts to come is waited for, and so is one with drafts. Drafts take what room
there is in the batch and in the memory that a request has reserved; they ask for none.

A request that goes on after a loss, or after it was put down, has its first token without drafts:
that token tells when it runs again, and with the second one a suspect has proved itself.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

from services.scheduler.core.batch import Batch, Span
from services.scheduler.core.drafting.drafts import SEARCHED_TOKENS, Drafter, n_leading_equal
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.policies import Selection
from services.scheduler.core.request import Request, RequestState

NO_DRAFTS: Mapping[Request, Sequence[int]] = MappingProxyType({})


class Drafting:
    """The drafts of one batch after the other."""

    def __init__(self, drafter: Drafter, kv_manager: KVManager, *, token_hand_off: bool) -> None:
        self.awaits = False
        """Whether the next batch waits for those in flight."""
        self._drafter = drafter
        self._kv_manager = kv_manager
        self._token_hand_off = token_hand_off

    def draft(self, selections: Sequence[Selection]) -> Mapping[Request, Sequence[int]]:
        """Returns the drafts of the batch that is selected, as long as it has room for them."""
        drafts = self._drafts_of(selections)
        self.awaits = self._token_hand_off and bool(drafts)
        return drafts

    def right_tokens(self, span: Span, token_ids: Iterator[int]) -> list[int]:
        """Takes the tokens of a span with drafts, and learns from them; returns those that come one
        by one without drafts: as many as were right, and the one after them."""
        sampled = [next(token_ids) for _ in range(1 + span.n_drafts)]
        n_right = n_leading_equal(span.token_ids[-span.n_drafts :], sampled)
        request = span.request
        is_over = request.state is RequestState.FINISHED or request.is_cancelled
        if request.speculation is not None and not is_over:
            self._drafter.learn(request.speculation, span.n_drafts, n_right)
        return sampled[: n_right + 1]

    def note_returned(self, batch: Batch, in_flight: Collection[Batch]) -> None:
        """Notes that the tokens of a batch are known; `in_flight` are those that are not back."""
        self.awaits = self._token_hand_off and self._has_drafts_to_come(batch, in_flight)

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

    def _drafts_of(self, selections: Sequence[Selection]) -> Mapping[Request, Sequence[int]]:
        max_batch_tokens = self._drafter.max_batch_tokens
        if len(selections) >= max_batch_tokens:
            return NO_DRAFTS
        n_tokens = sum([chosen.n_tokens for chosen in selections])
        n_free = max_batch_tokens - n_tokens
        if n_free <= 0:
            return NO_DRAFTS
        drafts: dict[Request, Sequence[int]] = {}
        for n_before, (request, _, reservation) in enumerate(selections):
            if request.n_awaited or request.n_unscheduled != 1 or not request.n_new_tokens:
                continue
            n_room = self._kv_manager.n_free_slots(reservation, request.n_tokens)
            n_share = -(-n_free // (len(selections) - n_before))
            draft = self._draft_of(request, n_tokens, min(n_room, n_share))
            if draft:
                drafts[request] = draft
                n_free -= len(draft)
        return drafts

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
