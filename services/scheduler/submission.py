"""Checks the submissions of frontends, and makes requests from them.

Frontends have made most of these checks for their clients. They are repeated here to protect the
ranks, which do not check the plans that they get: a rank that cannot run a request ends itself, and
this ends the epoch for the requests of all clients.
"""

import hashlib
import math
import secrets
from array import array
from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache

from orcinus.v1 import sampling_pb2, scheduler_pb2

from services.common.adapters import adapters_in, max_loaded_in
from services.common.errors import InvalidRequest, Unavailable
from services.common.pooling import pooling_in
from services.common.priority import PRIORITIES
from services.common.sampling import (
    MAX_LOGPROBS,
    MAX_PROMPT_LOGPROBS,
    SEED_BITS,
    SamplingParams,
)
from services.common.sampling_proto import from_proto
from services.scheduler.core.admission.adapter_gate import Sources
from services.scheduler.core.clients.accounts import AccountLimits, AccountUse
from services.scheduler.core.request import TOKEN_ID, Request, RequestId
from services.scheduler.core.speculation import Speculation

MAX_KNOWN = 256
"""Number of checked sampling options that are kept, so that equal options need not be checked
again."""

MAX_KNOWN_BYTES = 512
"""Largest size in bytes of sampling options that are remembered as checked. Larger ones are checked
each time."""

MAX_BUILD_LENGTH = 64
"""Largest number of characters in the name of a build."""

MAX_SALT_LENGTH = 256
"""Largest number of characters of a salt of the prefix cache; frontends have the same limit."""


def check_submission(
    submission: scheduler_pb2.Submission,
    pipeline: scheduler_pb2.PipelineDescription,
    adapters: Sources,
) -> SamplingParams:
    """Checks a submission for a pipeline and returns its sampling options, without the seed. A
    submission without a seed gets one, because all ranks must use the same seed. `adapters` are the
    adapters that clients have loaded.

    Raises:
        InvalidRequest: a field of the submission is invalid. The error names the field.
        Unavailable: the frontend is of another version.
    """
    # The defaults of another version would give other tokens.
    if not submission.HasField("sampling"):
        raise Unavailable("the frontend is of another version than the scheduler")
    _check_sequence(submission, pipeline)
    _check_adapter(submission.adapter.digest, pipeline, adapters)
    _check_vector(submission.wants_vector, submission.max_new_tokens, pipeline)
    if _needs_all_states(submission, pipeline) and not submission.is_uncached:
        raise InvalidRequest("cache_prompt", "must be false: the vector needs the whole prompt")
    PRIORITIES.check("priority", submission.priority)
    if submission.account.weight < 0 or not math.isfinite(submission.account.weight):
        raise InvalidRequest("account", f"cannot have the weight {submission.account.weight}")
    if len(submission.cache_salt) > MAX_SALT_LENGTH:
        raise InvalidRequest("cache_salt", f"exceeds {MAX_SALT_LENGTH} characters")
    if len(submission.build) > MAX_BUILD_LENGTH:
        raise InvalidRequest("build", f"exceeds {MAX_BUILD_LENGTH} characters")
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
    runs_whole: bool = False,
) -> Request:
    """Returns the request of a submission that was checked. `sampling` are the options of the
    submission. Their seed is not used. `runs_whole` says that the model must get a prompt in one
    iteration."""
    grammar = sampling.grammar.encode()
    return Request(
        request_id=RequestId(submission.request_id),
        prompt_token_ids=array(TOKEN_ID, submission.prompt_token_ids),
        max_new_tokens=submission.max_new_tokens,
        runs_whole=runs_whole,
        sampling=_without_grammar(submission.sampling),
        grammar=grammar,
        grammar_digest=hashlib.sha256(grammar).digest() if grammar else None,
        adapter=submission.adapter.digest,
        stop_token_ids=frozenset(sampling.stop_token_ids),
        speculation=_speculation_of(submission, sampling),
        generated_token_ids=array(TOKEN_ID, submission.generated_token_ids),
        n_losses=submission.n_losses,
        build=submission.build,
        account=account,
        priority=submission.priority,
        deadline=_deadline_of(submission, now),
        cache_scope=_cache_scope(submission),
        n_logprobs=submission.n_logprobs if submission.HasField("n_logprobs") else None,
        n_prompt_logprobs=(
            submission.n_prompt_logprobs if submission.HasField("n_prompt_logprobs") else None
        ),
    )


def refusal(
    request: Request, pipeline: scheduler_pb2.PipelineDescription, adapters: Sources
) -> InvalidRequest | None:
    """Returns the reason why a pipeline cannot run a request that was checked for another pipeline.
    Returns None if the pipeline can run the request. `adapters` are the adapters that clients have
    loaded."""
    sampling = replace(
        from_proto(sampling_pb2.SamplingParams.FromString(request.sampling)),
        grammar=request.grammar.decode(),
    )
    own = frozenset((*sampling.stop_token_ids, *pipeline.eos_token_ids))
    try:
        _check_sequence(request, pipeline)
        _check_adapter(request.adapter, pipeline, adapters)
        _check_vector(request.wants_vector, request.max_new_tokens, pipeline)
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
    """Checks the sampling options of a request for a pipeline. The check is needed because a rank
    that gets wrong options ends itself, and this ends the epoch for the requests of all clients.

    `own_stop_token_ids` are stop tokens that do not count as given by the client. If there are
    none, the end-of-sequence tokens of the pipeline are used.

    Raises:
        InvalidRequest: an option is invalid. The error names the option.
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
    """Checks options and returns them without the seed. A message without a seed gets a random
    one."""
    seed = message.seed if message.HasField("seed") else secrets.randbits(SEED_BITS)
    message.ClearField("seed")  # most clients send equal options that differ only in the seed
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


def _check_adapter(
    digest: str, pipeline: scheduler_pb2.PipelineDescription, adapters: Sources
) -> None:
    if not digest or digest in adapters_in(pipeline.traits).values():
        return
    if not max_loaded_in(pipeline.traits) or adapters.source_of(digest) is None:
        raise InvalidRequest("model", "the adapter is not loaded, or another version of it is")


def _check_vector(
    wants_vector: bool, max_new_tokens: int, pipeline: scheduler_pb2.PipelineDescription
) -> None:
    pooling = pooling_in(pipeline.traits)
    if wants_vector == (max_new_tokens > 0):
        raise InvalidRequest("max_tokens", "must be at least 1, or 0 for a vector")
    if wants_vector and pooling is None:
        raise InvalidRequest("model", "makes no vectors")
    if not wants_vector and pooling is not None and not pooling.generates:
        raise InvalidRequest("model", "makes vectors and generates no text")


def _needs_all_states(
    submission: scheduler_pb2.Submission, pipeline: scheduler_pb2.PipelineDescription
) -> bool:
    pooling = pooling_in(pipeline.traits)
    return submission.wants_vector and pooling is not None and pooling.needs_all_states


def _deadline_of(submission: scheduler_pb2.Submission, now: float) -> float | None:
    if not submission.HasField("time_left"):
        return None
    return now + submission.time_left.ToNanoseconds() / 1e9


def _cache_scope(submission: scheduler_pb2.Submission) -> bytes | None:
    """Returns the name of the scope in which a request shares keys and values in the prefix cache.
    Returns None if the request shares none."""
    if submission.is_uncached:
        return None
    name, adapter = submission.account.name, submission.adapter.digest
    of_adapter = f"adapter {adapter} " if adapter else ""  # other scopes begin with a number
    return f"{of_adapter}{len(name)}:{name}{submission.cache_salt}".encode()


def _without_grammar(options: sampling_pb2.SamplingParams) -> bytes:
    """Returns serialised options without the grammar, because the ranks get the grammar before the
    request."""
    if not options.grammar:
        return options.SerializeToString()
    rest = sampling_pb2.SamplingParams()
    rest.CopyFrom(options)
    rest.ClearField("grammar")
    return rest.SerializeToString()


def _speculation_of(
    submission: scheduler_pb2.Submission, sampling: SamplingParams
) -> Speculation | None:
    """Returns a new state of speculation for a request, or None if the request must have no drafts.

    Drafts need tokens that are chosen by their logits and positions alone. Penalties, grammars and
    banned words look at earlier tokens. Requests for log-probabilities have no drafts either,
    because log-probabilities of drafts are of no use.
    """
    looks_back = sampling.has_penalty or sampling.grammar or sampling.bad_words
    if looks_back or submission.HasField("n_logprobs"):
        return None
    return Speculation()
