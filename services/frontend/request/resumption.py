"""The resumption of a broken stream. The client sends the tokens that it has received, and any
frontend can continue the stream after these tokens.

The tokens, the seed and the rest of the request determine how an answer goes on and whether it has
ended. So a frontend need not keep any state for clients that may resume.
"""

from collections.abc import Collection
from dataclasses import dataclass

from services.common import errors
from services.frontend.request.finish_reason import FinishReason
from services.frontend.request.request_id import is_request_id

SEED_FIELD = "resumption.seed"
TOKENS_FIELD = "resumption.token_ids"
"""Name of the field with the tokens of each answer, as clients of the HTTP API spell it.
`SEED_FIELD` is the field with the seed."""


@dataclass(frozen=True, slots=True)
class AnswerSoFar:
    """The part of an answer that a client has: its tokens, and whether it has received the last
    piece."""

    token_ids: tuple[int, ...]
    is_finished: bool = False

    def ending(
        self, *, max_new_tokens: int, stop_token_ids: Collection[int]
    ) -> FinishReason | None:
        """Returns the reason why the answer ends with the last of `token_ids`, or None if the
        answer continues. Stop strings are not considered.

        Raises:
            InvalidRequest: the answer would have ended before the last of `token_ids`.
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
        if not max_new_tokens:  # an answer of no tokens begins anew unless the client has all of it
            return FinishReason.LENGTH if self.is_finished else None
        return FinishReason.LENGTH if n_tokens == max_new_tokens else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """The part of a stream that a client has. `answers` has the received part of each answer, by
    the index of the answer."""

    request_id: str
    seed: int
    answers: tuple[AnswerSoFar, ...]

    @property
    def n_tokens(self) -> int:
        """Number of tokens of all answers that the client has."""
        return sum(len(answer.token_ids) for answer in self.answers)

    def check(self, *, n_answers: int) -> None:
        """Checks all rules for a resumption that do not depend on the model.

        Raises:
            InvalidRequest: the resumption cannot belong to a request for `n_answers` answers.
        """
        if not is_request_id(self.request_id):
            raise errors.InvalidRequest(
                "resumption.request_id", "is not the name of a request; see the stream's events"
            )
        if len(self.answers) != n_answers:
            raise errors.InvalidRequest(
                TOKENS_FIELD, f"is of {len(self.answers)} answers; the request asks for {n_answers}"
            )
