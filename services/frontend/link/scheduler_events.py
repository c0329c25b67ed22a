"""Turns the scheduler's messages into events of single requests.

One message of the stream carries all results of an iteration. The reason why a request ended
becomes either a finish reason or an error of `services.common.errors`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from orcinus.v1 import scheduler_pb2

from services.common import errors
from services.common.named_tuples import maker
from services.frontend.request.finish_reason import FinishReason
from services.frontend.request.logprobs import Logprobs
from services.frontend.request.refusals import Refusal

TIMED_OUT = "the request took longer than it may"

_LIMITS = {
    scheduler_pb2.REJECTION_REASON_POOL_FULL: Refusal.IN_FLIGHT,
    scheduler_pb2.REJECTION_REASON_KEY_RATE: Refusal.KEY_RATE,
    scheduler_pb2.REJECTION_REASON_KEY_IN_FLIGHT: Refusal.KEY_IN_FLIGHT,
    scheduler_pb2.REJECTION_REASON_TOO_LATE: Refusal.TOO_LATE,
}


@dataclass(frozen=True, slots=True)
class Accepted:
    """Event: the scheduler has put the request into its pool."""

    request_id: str
    is_last: ClassVar[bool] = False


class OutputTokens(NamedTuple):
    """Event: the request has new tokens. `start` is the index of the first new token in the output,
    from 0."""

    request_id: str
    token_ids: Sequence[int]
    start: int
    logprobs: Logprobs | None = None
    n_cached: int = 0
    """Number of tokens of the prompt that were found in the cache. Set only in the event with the
    first token."""

    @property
    def is_last(self) -> bool:
        return False


tokens_of = maker(OutputTokens)
"""Function that makes an `OutputTokens` from a tuple of its fields, faster than the constructor
does."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Event: log-probabilities of tokens of the prompt. `position` is the index of the first of
    these tokens in the prompt."""

    request_id: str
    position: int
    logprobs: Logprobs
    is_last: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Vector:
    """Event: the vector (embedding or score) of the prompt. `values` has its numbers, each as a
    little-endian float of 4 bytes."""

    request_id: str
    values: bytes
    n_cached: int
    """Number of tokens of the prompt that were found in the cache."""
    is_last: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Suspended:
    """Event: the request waits for another pipeline, after `n_losses` consecutive losses of a
    pipeline."""

    request_id: str
    n_losses: int
    is_last: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Built:
    """Event: workers of the build `build` compute the tokens of the request from now on. `traits`
    are facts about the workers, such as the digest of the weights, if the submission asked for
    them."""

    request_id: str
    build: str
    traits: Mapping[str, str]
    is_last: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Completed:
    """Event: the output of the request is complete."""

    request_id: str
    reason: FinishReason
    is_last: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Failed:
    """Event: the request ended with an error, so its output is not complete."""

    request_id: str
    error: errors.OrcinusError
    refusal: Refusal | None = None
    """The limit that the request exceeds, if this is the reason of the failure."""
    is_last: ClassVar[bool] = True


Event = Accepted | PromptLogprobs | OutputTokens | Vector | Suspended | Built | Completed | Failed


def news_of(response: scheduler_pb2.ConnectResponse) -> Iterator[Event]:
    """Yields the events of one message in the order in which they happened, but not the ends of
    requests (`ends_of`) and the tokens in columns (`columns_of`)."""
    for suspension in response.suspended:  # a message with a loss begins with it
        yield Suspended(suspension.request_id, suspension.n_losses)
    for accepted in response.accepted:
        yield Accepted(accepted.request_id)
    for rejected in response.rejected:
        yield Failed(rejected.request_id, _rejection_error(rejected), _LIMITS.get(rejected.reason))
    for built in response.builds:
        yield Built(built.request_id, built.build, built.traits)
    for update in response.tokens:
        token_ids = tuple(update.token_ids)
        if update.vector:
            yield Vector(update.request_id, update.vector, update.n_cached_tokens)
            continue
        if update.prompt_logprobs:
            for piece in update.prompt_logprobs:
                logprobs = Logprobs.parse(piece.logprobs)
                yield PromptLogprobs(update.request_id, piece.position, logprobs)
            if not token_ids:
                continue
        of_tokens = Logprobs.parse(update.logprobs) if update.logprobs else None
        start = update.start
        n_cached = 0 if start else update.n_cached_tokens
        yield OutputTokens(update.request_id, token_ids, start, of_tokens, n_cached)


def columns_of(
    response: scheduler_pb2.ConnectResponse,
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yields the new tokens that one message has in columns (parallel lists). Each item has the
    number of a request, the index of the first new token in the output, and the new tokens."""
    if not response.HasField("columns"):
        return
    columns = response.columns
    token_ids, at = tuple(columns.token_ids), 0
    places = zip(columns.numbers, columns.starts, columns.n_tokens, strict=False)
    for number, start, n_tokens in places:  # `start` shows if tokens are missing
        end = at + n_tokens
        yield number, start, token_ids[at:end]
        at = end


def ends_of(response: scheduler_pb2.ConnectResponse) -> Iterator[Event]:
    """Yields the events of one message that end requests. These come after the new tokens of the
    message."""
    for completed in response.completed:
        yield _end(completed)


def _end(completed: scheduler_pb2.Completion) -> Completed | Failed:
    match completed.reason:
        case scheduler_pb2.COMPLETION_REASON_STOP:
            return Completed(completed.request_id, FinishReason.STOP)
        case scheduler_pb2.COMPLETION_REASON_LENGTH:
            return Completed(completed.request_id, FinishReason.LENGTH)
        case scheduler_pb2.COMPLETION_REASON_FAILED:
            error = errors.RequestFailed(completed.message or "the request could not be served")
            return Failed(completed.request_id, error)
        case scheduler_pb2.COMPLETION_REASON_TIMED_OUT:
            return Failed(completed.request_id, errors.TimedOut(TIMED_OUT, may_retry=False))
    # The frontend forgets requests that it cancels, so the scheduler has cancelled this one.
    return Failed(completed.request_id, _unavailable(completed.message or "the pipeline was lost"))


def _rejection_error(rejected: scheduler_pb2.Rejection) -> errors.OrcinusError:
    match rejected.reason:
        case scheduler_pb2.REJECTION_REASON_INVALID:
            return errors.InvalidRequest(
                rejected.field or "prompt", rejected.message or "refused by the scheduler"
            )
        case (
            scheduler_pb2.REJECTION_REASON_POOL_FULL
            | scheduler_pb2.REJECTION_REASON_KEY_RATE
            | scheduler_pb2.REJECTION_REASON_KEY_IN_FLIGHT
            | scheduler_pb2.REJECTION_REASON_TOO_LATE
        ):
            return errors.PoolFull(
                rejected.message or "too many requests", retry_after_s=_retry_after_s(rejected)
            )
    return _unavailable(rejected.message or "the scheduler takes no requests")


def _unavailable(message: str) -> errors.Unavailable:
    """Returns the error Unavailable with `message` and the advice to try again."""
    return errors.Unavailable(f"{message}; try again")


def _retry_after_s(rejected: scheduler_pb2.Rejection) -> float:
    if not rejected.HasField("retry_after"):
        return errors.RETRY_AFTER_S
    return rejected.retry_after.ToNanoseconds() / 1e9
