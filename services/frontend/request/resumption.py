"""A stream that broke, as far as its client has it. Any frontend goes on from there.

The tokens say all: how an answer goes on, and whether it has ended, follows from them, the seed and
the rest of the request. So nothing is kept for a client that may come back.
"""

from collections.abc import Collection
from dataclasses import dataclass

from services.common import errors
from services.frontend.request.finish_reason import FinishReason
from services.frontend.request.request_id import is_request_id

SEED_FIELD = "resumption.seed"
TOKENS_FIELD = "resumption.token_ids"
"""Names of fields, as clients of the HTTP API spell them."""


@dataclass(frozen=True, slots=True)
class AnswerSoFar:
    """The part of an answer that a client has: its tokens, and whether it has its last piece."""

    token_ids: tuple[int, ...]
    is_finished: bool = False

    def ending(
        self, *, max_new_tokens: int, stop_token_ids: Collection[int]
    ) -> FinishReason | None:
        """Returns why the answer ends with the last of these tokens, stop strings apart; None if it
        goes on.

        Raises:
            InvalidRequest: it would have ended before.
        """
        n_tokens = len(self.token_ids)
        if n_tokens > max_new_tokens:
            raise errors.InvalidRequest(
                TOKENS_FIELD, f"has {n_tokens} tokens of an answer of at most {max_new_tokens}"
            )
        if not set(stop_token_ids).isdisjoint(self.token_ids[:-1]):
            raise errors.InvalidRequest(TOKENS_FIELD, "has tokens after one that ends the answer")
        if self.token_ids and self.token_ids[-1] in stop_token_ids:
            return FinishReason.STOP
        if not max_new_tokens:  # an answer without tokens begins anew unless it is there whole
            return FinishReason.LENGTH if self.is_finished else None
        return FinishReason.LENGTH if n_tokens == max_new_tokens else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """The part of a stream that a client has, its answers by their index."""

    request_id: str
    seed: int
    answers: tuple[AnswerSoFar, ...]

    @property
    def n_tokens(self) -> int:
        """The number of tokens that the client has, over all answers."""
        return sum(len(answer.token_ids) for answer in self.answers)

    def check(self, *, n_answers: int) -> None:
        """Checks everything that doesn't depend on the model.

        Raises:
            InvalidRequest: it cannot be of a request for so many answers.
        """
        if not is_request_id(self.request_id):
            raise errors.InvalidRequest(
                "resumption.request_id", "is not the name of a request; see the stream's events"
            )
        if len(self.answers) != n_answers:
            raise errors.InvalidRequest(
                TOKENS_FIELD, f"is of {len(self.answers)} answers; the request asks for {n_answers}"
            )
