"""A request as a sequence of tokens, and its state in Algorithm 1 (Orca, section 4.2)."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from typing import NewType

from services.scheduler.core.clients.accounts import AccountUse
from services.scheduler.core.clients.client import ServedClient
from services.scheduler.core.memory.holder import BlockKeys
from services.scheduler.core.memory.reservation import Reservation
from services.scheduler.core.speculation import Speculation

RequestId = NewType("RequestId", str)

TOKEN_ID = "I"
"""Type code of arrays of tokens. A token takes 4 bytes in such an array, and 36 in a list."""


class RequestState(Enum):
    """The states of the paper, and FINISHED for a request that the paper would remove from the
    pool."""

    INITIATION = auto()
    """Waits to run for the first time, or to be computed again."""
    RUNNING = auto()
    """In at least one batch that has been sent and has not returned."""
    INCREMENT = auto()
    """Has run and waits for its next iteration."""
    FINISHED = auto()
    """Has ended; holds memory only as long as batches in flight use that memory."""


class FinishReason(Enum):
    """The reason why a request ended."""

    STOP = auto()
    LENGTH = auto()
    CANCELLED = auto()
    FAILED = auto()
    TIMED_OUT = auto()


MAX_LOSSES = 4
"""A request counts as the cause if this many epochs in a row are lost while it is in flight. At the
first two losses many requests may have been in flight; at the later ones this request was the only
suspect in flight."""

MAX_DEATHS = 2
"""A request counts as the cause if a rank failed by itself (by an error or a signal) at this many
of the losses that its `n_losses` counts. The number is smaller than `MAX_LOSSES`, because such a
failure is stronger evidence than the loss of a node."""

N_PROVING_TOKENS = 2
"""Number of new tokens after which a request is no longer suspected of a loss, and may again be
moved away from a late pipeline. By then it has run as a prefill and as a decode."""


@dataclass(slots=True, eq=False)
class Request:
    """A request, with all data that the scheduler has about it.

    The sequence of a request consists of the prompt, the generated tokens, and `n_awaited` tokens
    that are being sampled. The first `n_scheduled` tokens of the sequence have been sent to the
    ranks, so their keys and values are stored or about to be stored. A request may arrive with
    tokens that were generated under an earlier leader, and may be preempted and computed again. In
    both cases, the tokens that it then has are its prefill.
    """

    request_id: RequestId
    prompt_token_ids: Sequence[int]
    max_new_tokens: int
    """Largest number of tokens to generate. With 0 the request gets a vector (`wants_vector`)."""
    sampling: bytes = b""
    """A serialised `SamplingParams` of `sampling.proto`, without the grammar; the core does not
    read it."""
    grammar: bytes = b""
    """The grammar that the output follows, as UTF-8; the core does not read it."""
    grammar_digest: bytes | None = None
    """Digest of the grammar; None where the output follows no grammar."""
    adapter: str = ""
    """Digest of the adapter that the request uses; empty where it uses none."""
    n_logprobs: int | None = None
    """Number of alternatives to report with the log-probability of each new token; None where no
    log-probabilities are wanted."""
    n_prompt_logprobs: int | None = None
    """Number of alternatives to report with the log-probability of each prompt token except the
    first; None where no log-probabilities of the prompt are wanted. They are reported before the
    first new token."""
    stop_token_ids: frozenset[int] = frozenset()
    speculation: Speculation | None = None
    """Success of the request's drafts so far; None where drafts cannot be verified."""
    account: AccountUse | None = None
    """The account against whose limits the request counts; None without an API key."""
    priority: int = 0
    """The request's priority class: lower numbers come earlier, where the order uses classes."""
    deadline: float | None = None
    """Time, by the scheduler's clock, at which the request is given up if it still waits."""
    client: ServedClient | None = None
    """The client that is charged for the request; set by an order that is fair to clients."""
    arrival: int = -1
    """The request's number in the order of arrival; set by the pool."""
    place: int = -1
    """The request's place among the running requests; set by the pool's order."""
    state: RequestState = RequestState.INITIATION
    generated_token_ids: "array[int]" = field(default_factory=partial(array, TOKEN_ID))
    n_losses: int = 0
    """Number of epochs lost in a row with the request in flight; 0 again once it proves
    harmless."""
    n_deaths: int = 0
    """Number of the losses in `n_losses` at which a rank failed by itself (error or signal)."""
    pipeline: int = -1
    """Number of the pipeline that admitted the request last; -1 before the first admission."""
    moved_from: int | None = None
    """Number of the pipeline that the request left, if the last admission moved the request to
    another pipeline. Otherwise None."""
    build: str = ""
    """Build of the workers of the pipeline that admitted the request last; empty before the first
    admission, or where builds have no names."""
    left_build: str | None = None
    """Name of the workers' build that made the earlier tokens of the request, if the last admission
    moved the request to workers of another build. Otherwise None."""
    was_late: bool = False
    """Whether the request was moved because its pipeline was late."""
    n_prefill_tokens: int = 0
    """Number of tokens that the request had when it came into the pool, or when its computation was
    last restarted."""
    n_scheduled: int = 0
    """Number of tokens that have been sent to the ranks."""
    n_awaited: int = 0
    """Number of tokens that the batches in flight are sampling for the request."""
    n_in_flight: int = 0
    """Number of batches with this request that have not returned."""
    drafts: Sequence[int] = ()
    """Drafted tokens of the request in the batch that has not returned. They do not count as
    scheduled."""
    cache_scope: bytes | None = b""
    """Scope of the prefix cache: requests with equal scopes share cached blocks; a request with
    None shares none."""
    block_keys: BlockKeys | None = None
    """The keys of the request's blocks in the prefix cache."""
    n_cached_tokens: int = 0
    """Number of the request's tokens in the prefix cache when the request was last admitted."""
    n_wanted_blocks: int = 0
    """Number of further blocks for which the request waited when its reservation last could not
    grow."""
    n_preemptions: int = 0
    """Number of times that the request was preempted."""
    reservation: Reservation | None = None
    is_cancelled: bool = False
    """Whether the request was cancelled while running; it ends when its next batch returns."""
    is_broken: bool = False
    """Whether numbers that the model computed for the request are not finite."""
    is_cut: bool = False
    """Whether the output ends before its grammar is complete, because a rank cannot follow the
    grammar further."""
    runs_whole: bool = False
    """Whether the prompt must be computed in one iteration, as encoders require."""
    n_prompt_tokens: int = field(init=False)
    n_tokens: int = field(init=False)
    """Number of known tokens of the sequence. Stored because it is read often for each token."""

    def __post_init__(self) -> None:
        self.n_prompt_tokens = len(self.prompt_token_ids)
        self.n_tokens = self.n_prompt_tokens + len(self.generated_token_ids)

    @property
    def wants_vector(self) -> bool:
        """Whether the request gets a vector (embedding, scores) of its prompt instead of tokens."""
        return not self.max_new_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt are wanted and not complete yet. They are
        complete before the first new token."""
        return self.n_prompt_logprobs is not None and not self.generated_token_ids

    @property
    def n_option_bytes(self) -> int:
        """Number of bytes of the request's options, including its grammar."""
        return len(self.sampling) + len(self.grammar)

    @property
    def is_suspect(self) -> bool:
        """Whether the request may have caused the loss of a pipeline."""
        return self.n_losses > 0

    @property
    def needs_trial(self) -> bool:
        """Whether the request is admitted as the only suspect on trial, so that a loss can be
        blamed on it. True if it was in flight at two losses of a pipeline in a row, or when a rank
        failed by itself (by an error or a signal)."""
        return self.n_losses > 1 or self.n_deaths > 0

    @property
    def may_move(self) -> bool:
        """Whether the request moves to another pipeline if its own pipeline is late. A suspect
        (`is_suspect`) stays. A request that was moved before and has made no progress after that
        stays too, because it may be the cause of the delay."""
        if self.is_suspect:
            return False
        return not self.was_late or self.n_new_tokens >= N_PROVING_TOKENS

    @property
    def is_decoding(self) -> bool:
        """Whether the prefill is over, so that the next span is a decode."""
        return self.n_scheduled >= self.n_prefill_tokens

    @property
    def n_new_tokens(self) -> int:
        """Number of tokens generated since the request came into the pool, or since its computation
        was last restarted."""
        return self.n_tokens - self.n_prefill_tokens

    @property
    def n_unscheduled(self) -> int:
        """Number of tokens, awaited ones included, that have not been sent to the ranks."""
        return self.n_tokens + self.n_awaited - self.n_scheduled

    @property
    def max_sequence_len(self) -> int:
        """Largest length that the sequence may reach. This is also the number of K/V slots that the
        request may need.

        The paper calls this length `max_tokens`. For a client of the API, `max_tokens` is the
        number of new tokens.
        """
        return self.n_prompt_tokens + self.max_new_tokens

    def can_run(self) -> bool:
        """Returns whether the request could join the next iteration, even if it is in other
        batches.

        While a part of the prompt is in flight, the next part can run, because it depends on
        nothing that these batches compute. The request cannot run while its last token is awaited,
        or while its drafts are being verified.
        """
        return self.n_scheduled < self.n_tokens and not (self.is_cancelled or self.drafts)

    def can_run_ahead(self) -> bool:
        """Returns whether the request could join the next iteration with token hand-off
        (`scheduler.py`), also if a rank has yet to sample its last token."""
        if self.is_cancelled or self.drafts:
            return False
        if self.n_scheduled < self.n_tokens:
            return True
        n_coming = self.n_tokens + self.n_awaited
        return n_coming < self.n_prompt_tokens + self.max_new_tokens

    def span(self, start: int, n_tokens: int) -> list[int]:
        """Returns the `n_tokens` tokens of the sequence from position `start` on."""
        first = start - self.n_prompt_tokens
        if first >= 0:
            if n_tokens == 1:  # a decode; this takes half the time of a slice
                return [self.generated_token_ids[first]]
            return self.generated_token_ids[first : first + n_tokens].tolist()
        head = self.prompt_token_ids[start : start + n_tokens]
        return [*head, *self.generated_token_ids[: n_tokens - len(head)]]

    def packed_span(self, start: int, n_tokens: int) -> bytes:
        """Returns the `n_tokens` tokens of the sequence from position `start` on, packed in 4 bytes
        each."""
        first = start - self.n_prompt_tokens
        if first >= 0:
            return self.generated_token_ids[first : first + n_tokens].tobytes()
        packed = array(TOKEN_ID, self.prompt_token_ids[start : start + n_tokens])
        return (packed + self.generated_token_ids[: n_tokens - len(packed)]).tobytes()

    def begin_anew(self) -> None:
        """Resets the request, so that all its tokens are computed again. The caller must have
        released the memory of the request on the ranks."""
        self.state = RequestState.INITIATION
        self.reservation = None
        self.n_scheduled = self.n_awaited = self.n_in_flight = 0
        self.drafts = ()
        self.n_tokens = self.n_prompt_tokens + len(self.generated_token_ids)
        self.n_prefill_tokens = self.n_tokens

    def left_behind(self) -> "Request":
        """Returns a copy of the request in the state FINISHED. The copy takes the request's place
        in batches in flight when the request itself continues in another pipeline. It keeps the
        memory of the request until these batches have returned, and their results are discarded."""
        known = self.generated_token_ids[:]
        return replace(self, state=RequestState.FINISHED, generated_token_ids=known)

    def accept(self, token_id: int) -> FinishReason | None:
        """Appends a sampled token. Returns the reason if the request ends with this token,
        otherwise None."""
        self.generated_token_ids.append(token_id)
        self.n_tokens = n_tokens = self.n_tokens + 1
        client = self.client
        if client is not None:
            client.served += client.output_charge
        if self.n_losses and self.n_new_tokens >= N_PROVING_TOKENS:
            self.n_losses = self.n_deaths = 0
        if token_id in self.stop_token_ids:
            return FinishReason.LENGTH if self.is_cut else FinishReason.STOP
        if n_tokens == self.n_prompt_tokens + self.max_new_tokens:
            return FinishReason.LENGTH
        return None
