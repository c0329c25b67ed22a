"""Submissions of frontends: what is checked of them, and the requests that they become.

Frontends have checked most of this for their clients. Here it is checked for the ranks, which trust
what they are sent: a rank ends itself, and with it the requests of all clients, over what it cannot
run.
"""

import hashlib
import math
import secrets
from array import array
from collections.abc import Collection
from functools import lru_cache

from orcinus.v1 import sampling_pb2, scheduler_pb2

from services.common.errors import InvalidRequest, Unavailable
from services.common.priority import PRIORITIES
from services.common.sampling import (
    MAX_LOGPROBS,
    MAX_PROMPT_LOGPROBS,
    SEED_BITS,
    SamplingParams,
)
from services.common.sampling_proto import from_proto
from services.scheduler.core.clients.accounts import AccountLimits, AccountUse
from services.scheduler.core.request import TOKEN_ID, Request, RequestId
from services.scheduler.core.speculation import Speculation

MAX_KNOWN = 256
"""Number of sampling options that are kept once they were checked."""

MAX_KNOWN_BYTES = 512
"""Largest size in bytes of sampling options that are kept."""

MAX_SALT_LENGTH = 256
"""Characters of a salt of the prefix cache, as frontends allow."""


def check_submission(
    submission: scheduler_pb2.Submission, pipeline: scheduler_pb2.PipelineDescription
) -> SamplingParams:
    """Checks a submission for a pipeline, and gives it a seed if it came without one: all ranks
    must have the same. Returns its options, but for the seed.

    Raises:
        InvalidRequest: the error names the field.
        Unavailable: the frontend is of another version.
    """
    if not submission.HasField("sampling"):  # others' defaults would give other tokens
        raise Unavailable("the frontend is of another version than the scheduler")
    _check_sequence(submission, pipeline)
    PRIORITIES.check("priority", submission.priority)
    if submission.account.weight < 0 or not math.isfinite(submission.account.weight):
        raise InvalidRequest("account", f"cannot have the weight {submission.account.weight}")
    if len(submission.cache_salt) > MAX_SALT_LENGTH:
        raise InvalidRequest("cache_salt", f"exceeds {MAX_SALT_LENGTH} characters")
    for field in ("n_logprobs", "n_prompt_logprobs"):
        if getattr(submission, field) > MAX_LOGPROBS:
            raise InvalidRequest(field.removeprefix("n_"), f"{MAX_LOGPROBS} at most")
    n_numbers = len(submission.prompt_token_ids) * (1 + submission.n_prompt_logprobs)
    if submission.HasField("n_prompt_logprobs") and n_numbers > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            "prompt_logprobs", f"are {n_numbers} numbers, {MAX_PROMPT_LOGPROBS} at most"
        )
    return _checked_sampling(submission.sampling, pipeline)


def account_limits(submission: scheduler_pb2.Submission) -> AccountLimits:
    """Returns the limits of the account that a submission names."""
    account = submission.account
    return AccountLimits(
        tokens_per_minute=account.tokens_per_minute or None,
        max_in_flight_tokens=account.max_in_flight_tokens or None,
        weight=account.weight or 1.0,
    )


def to_request(
    submission: scheduler_pb2.Submission,
    sampling: SamplingParams,
    *,
    account: AccountUse | None,
    now: float,
) -> Request:
    """Returns the request of a submission that was checked; `sampling` are its options, with any
    seed."""
    return Request(
        request_id=RequestId(submission.request_id),
        prompt_token_ids=array(TOKEN_ID, submission.prompt_token_ids),
        max_new_tokens=submission.max_new_tokens,
        sampling=submission.sampling.SerializeToString(),
        grammar_digest=_digest(sampling.grammar) if sampling.grammar else None,
        stop_token_ids=frozenset(sampling.stop_token_ids),
        speculation=_speculation_of(submission, sampling),
        generated_token_ids=array(TOKEN_ID, submission.generated_token_ids),
        n_losses=submission.n_losses,
        account=account,
        priority=submission.priority,
        deadline=_deadline_of(submission, now),
        cache_scope=_cache_scope(submission),
        n_logprobs=submission.n_logprobs if submission.HasField("n_logprobs") else None,
        n_prompt_logprobs=(
            submission.n_prompt_logprobs if submission.HasField("n_prompt_logprobs") else None
        ),
    )


def refusal(request: Request, pipeline: scheduler_pb2.PipelineDescription) -> InvalidRequest | None:
    """Returns the reason for which a pipeline cannot take a request that was checked for another
    one; None if it can."""
    sampling = from_proto(sampling_pb2.SamplingParams.FromString(request.sampling))
    own = frozenset((*sampling.stop_token_ids, *pipeline.eos_token_ids))
    try:
        _check_sequence(request, pipeline)
        check_sampling(sampling, pipeline, own_stop_token_ids=own)
    except InvalidRequest as error:
        return error
    return None


def check_sampling(
    sampling: SamplingParams,
    pipeline: scheduler_pb2.PipelineDescription,
    *,
    own_stop_token_ids: Collection[int] = (),
) -> None:
    """Checks options for a pipeline: a rank would end itself, and with it the requests of all
    clients, over what is refused here. `own_stop_token_ids` are the model's own ones, if not by
    default.

    Raises:
        InvalidRequest: the error names the option.
    """
    own = own_stop_token_ids or frozenset(pipeline.eos_token_ids)
    sampling.check(own_stop_token_ids=own)
    if sampling.grammar and not pipeline.can_follow_grammars:
        raise InvalidRequest("grammar", "the model can follow none")
    if min(sampling.stop_token_ids, default=0) < 0:
        raise InvalidRequest("stop_token_ids", "tokens must not be negative")
    sampling.check_vocabulary(pipeline.vocab_size, own_stop_token_ids=own)


def _checked_sampling(
    message: sampling_pb2.SamplingParams, pipeline: scheduler_pb2.PipelineDescription
) -> SamplingParams:
    """Returns options that were checked, with any seed; the message has one from here on."""
    seed = message.seed if message.HasField("seed") else secrets.randbits(SEED_BITS)
    message.ClearField("seed")  # most clients send equal options again and again, but for the seed
    data = message.SerializeToString()
    message.seed = seed
    read = _known_sampling if len(data) <= MAX_KNOWN_BYTES else _read_sampling
    return read(
        data, pipeline.vocab_size, tuple(pipeline.eos_token_ids), pipeline.can_follow_grammars
    )


def _read_sampling(
    data: bytes, vocab_size: int, eos_token_ids: tuple[int, ...], can_follow_grammars: bool
) -> SamplingParams:
    sampling = from_proto(sampling_pb2.SamplingParams.FromString(data))
    check_sampling(
        sampling,
        scheduler_pb2.PipelineDescription(
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            can_follow_grammars=can_follow_grammars,
        ),
    )
    return sampling


_known_sampling = lru_cache(MAX_KNOWN)(_read_sampling)


def _check_sequence(
    request: scheduler_pb2.Submission | Request, pipeline: scheduler_pb2.PipelineDescription
) -> None:
    prompt, generated = request.prompt_token_ids, request.generated_token_ids
    largest = max(max(prompt, default=0), max(generated, default=0))
    if largest >= pipeline.vocab_size:
        raise InvalidRequest("prompt", f"token {largest} is not below {pipeline.vocab_size}")
    n_tokens = len(prompt) + request.max_new_tokens
    if n_tokens > pipeline.max_model_len:
        raise InvalidRequest(
            "max_tokens",
            f"prompt and output of {n_tokens} tokens exceed the limit of {pipeline.max_model_len}",
        )


def _deadline_of(submission: scheduler_pb2.Submission, now: float) -> float | None:
    if not submission.HasField("time_left"):
        return None
    return now + submission.time_left.ToNanoseconds() / 1e9


def _cache_scope(submission: scheduler_pb2.Submission) -> bytes | None:
    """Returns the name of the scope in which a request shares keys and values; None if it shares
    none."""
    if submission.is_uncached:
        return None
    name = submission.account.name
    return f"{len(name)}:{name}{submission.cache_salt}".encode()


def _digest(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode(errors="surrogatepass")).digest()


def _speculation_of(
    submission: scheduler_pb2.Submission, sampling: SamplingParams
) -> Speculation | None:
    """Returns the beginning of speculation, where each of a request's tokens is chosen by its
    logits and position alone; None elsewhere: penalties and grammars look at all tokens before, and
    log-probabilities of drafts are of no use."""
    if sampling.has_penalty or sampling.grammar or submission.HasField("n_logprobs"):
        return None
    return Speculation()
