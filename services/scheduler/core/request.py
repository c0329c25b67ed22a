"""A request in tokens, and its state in Algorithm 1 (Orca, section 4.2)."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
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
"""Typecode of arrays of tokens: 4 bytes each, where a list of them takes 36."""


class RequestState(Enum):
    """The paper's states. FINISHED is where the paper removes a request from the pool."""

    INITIATION = auto()
    """Never run."""
    RUNNING = auto()
    """In at least one batch that has been sent and has not returned."""
    INCREMENT = auto()
    """Has run and wants to run again."""
    FINISHED = auto()
    """Has ended; holds only the memory that batches in flight still use."""


class FinishReason(Enum):
    """The reason why a request ended."""

    STOP = auto()
    LENGTH = auto()
    CANCELLED = auto()
    FAILED = auto()
    TIMED_OUT = auto()


MAX_LOSSES = 3
"""Epochs in a row that may be lost with a request in flight: then it counts as the cause."""

N_PROVING_TOKENS = 2
"""New tokens with which a suspect is cleared: it has been run as a prefill and as a decode."""


@dataclass(slots=True, eq=False)
class Request:
    """A request, and all that the scheduler knows of it.

    Its sequence is the prompt followed by the generated tokens, and by `n_awaited` tokens that are
    being sampled. Of these, the first `n_scheduled` have been sent to the ranks, so that their keys
    and values are stored or about to be. A request may come with tokens that it generated
    elsewhere, and be preempted and begin anew: all tokens that it has then are its prefill.
    """

    request_id: RequestId
    prompt_token_ids: Sequence[int]
    max_new_tokens: int
    sampling: bytes = b""
    """A serialised `SamplingParams` of `sampling.proto`; only the ranks read it."""
    grammar_digest: bytes | None = None
    """Digest of the grammar that the output follows; None where it follows none."""
    n_logprobs: int | None = None
    """Number of alternatives that are wanted with the log-probability of each new token; None where
    no log-probabilities are wanted."""
    n_prompt_logprobs: int | None = None
    """Number of alternatives that are wanted with the log-probability of each prompt token but the
    first, before the first new token; None where none are wanted."""
    stop_token_ids: frozenset[int] = frozenset()
    speculation: Speculation | None = None
    """How far drafts of its tokens have been right; None where drafts cannot be verified."""
    account: AccountUse | None = None
    """The account whose limits the request counts towards; None without an API key."""
    priority: int = 0
    """The request's class: lower numbers come earlier, where the order knows classes."""
    deadline: float | None = None
    """When the request is given up if it still waits, by the scheduler's clock."""
    client: ServedClient | None = None
    """The client that is charged for the request, assigned by an order that counts service."""
    arrival: int = -1
    """The place in the order of arrival, assigned by the pool."""
    place: int = -1
    """The place among the requests that run, assigned by the pool's order."""
    state: RequestState = RequestState.INITIATION
    generated_token_ids: "array[int]" = field(default_factory=partial(array, TOKEN_ID))
    n_losses: int = 0
    """Epochs in a row that were lost with this request in flight, before it was cleared."""
    n_prefill_tokens: int = 0
    """Number of tokens when the request last began anew, or came into the pool."""
    n_scheduled: int = 0
    """Tokens that have been sent to the ranks."""
    n_awaited: int = 0
    """Tokens that the batches in flight are sampling."""
    n_in_flight: int = 0
    """Batches with this request that have not returned."""
    drafts: Sequence[int] = ()
    """Tokens that are guessed to follow, in the batch that has not returned; they do not count as
    scheduled."""
    cache_scope: bytes | None = b""
    """Requests with the same scope share what the prefix cache has; None shares nothing."""
    block_keys: BlockKeys | None = None
    """The keys of its blocks in the prefix cache."""
    n_cached_tokens: int = 0
    """Tokens that the prefix cache had when the request was last admitted."""
    n_wanted_blocks: int = 0
    """Blocks that it asked for when its reservation last could not grow."""
    n_preemptions: int = 0
    """Times that it was preempted."""
    reservation: Reservation | None = None
    is_cancelled: bool = False
    """Whether the request was cancelled while running; it ends when its next batch returns."""
    is_cut: bool = False
    """Whether the output ends before its grammar does, since a rank cannot follow it further."""
    n_prompt_tokens: int = field(init=False)
    n_tokens: int = field(init=False)
    """Number of tokens of the sequence so far; kept, since it is read many times for each token."""

    def __post_init__(self) -> None:
        self.n_prompt_tokens = len(self.prompt_token_ids)
        self.n_tokens = self.n_prompt_tokens + len(self.generated_token_ids)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt are wanted and are not all there: they come
        before the first new token."""
        return self.n_prompt_logprobs is not None and not self.generated_token_ids

    @property
    def is_suspect(self) -> bool:
        """Whether the request may be the cause of a loss."""
        return self.n_losses > 0

    @property
    def is_decoding(self) -> bool:
        """Whether the next span comes after all tokens that the request began with."""
        return self.n_scheduled >= self.n_prefill_tokens

    @property
    def n_new_tokens(self) -> int:
        """Number of tokens that were generated since the request began, or began anew."""
        return self.n_tokens - self.n_prefill_tokens

    @property
    def n_unscheduled(self) -> int:
        """Number of tokens, awaited ones included, that have not been sent to the ranks."""
        return self.n_tokens + self.n_awaited - self.n_scheduled

    @property
    def max_sequence_len(self) -> int:
        """The longest that the sequence may become, and so the K/V slots that it may need.

        The paper calls it `max_tokens`, which to a client is the number of new tokens.
        """
        return self.n_prompt_tokens + self.max_new_tokens

    def can_run(self) -> bool:
        """Returns whether the request could join the next iteration, whatever batches it is in.

        It could with a part of the prompt, which depends on nothing that these batches compute. It
        could not while its last token, or the verdict on its drafts, is awaited.
        """
        return self.n_scheduled < self.n_tokens and not (self.is_cancelled or self.drafts)

    def can_run_ahead(self) -> bool:
        """Returns whether the request could join the next iteration where tokens are handed off:
        then it also could with a token that a rank will have sampled by then."""
        if self.is_cancelled or self.drafts:
            return False
        if self.n_scheduled < self.n_tokens:
            return True
        n_coming = self.n_tokens + self.n_awaited
        return n_coming < self.n_prompt_tokens + self.max_new_tokens

    def span(self, start: int, n_tokens: int) -> list[int]:
        """Returns tokens `start` to `start + n_tokens` of the sequence."""
        first = start - self.n_prompt_tokens
        if first >= 0:
            if n_tokens == 1:  # a decode: half the time of a slice
                return [self.generated_token_ids[first]]
            return self.generated_token_ids[first : first + n_tokens].tolist()
        head = self.prompt_token_ids[start : start + n_tokens]
        return [*head, *self.generated_token_ids[: n_tokens - len(head)]]

    def packed_span(self, start: int, n_tokens: int) -> bytes:
        """Returns tokens `start` to `start + n_tokens` of the sequence, 4 bytes each."""
        first = start - self.n_prompt_tokens
        if first >= 0:
            return self.generated_token_ids[first : first + n_tokens].tobytes()
        packed = array(TOKEN_ID, self.prompt_token_ids[start : start + n_tokens])
        return (packed + self.generated_token_ids[: n_tokens - len(packed)]).tobytes()

    def begin_anew(self) -> None:
        """Takes the request back to its beginning, with the tokens that it has. What it held on the
        ranks must be released."""
        self.state = RequestState.INITIATION
        self.reservation = None
        self.n_scheduled = self.n_awaited = self.n_in_flight = 0
        self.drafts = ()
        self.n_tokens = self.n_prompt_tokens + len(self.generated_token_ids)
        self.n_prefill_tokens = self.n_tokens

    def accept(self, token_id: int) -> FinishReason | None:
        """Appends a sampled token; returns why the request ends with it, or None."""
        self.generated_token_ids.append(token_id)
        self.n_tokens = n_tokens = self.n_tokens + 1
        client = self.client
        if client is not None:
            client.served += client.output_charge
        if self.n_losses and self.n_new_tokens >= N_PROVING_TOKENS:
            self.n_losses = 0
        if token_id in self.stop_token_ids:
            return FinishReason.LENGTH if self.is_cut else FinishReason.STOP
        if n_tokens == self.n_prompt_tokens + self.max_new_tokens:
            return FinishReason.LENGTH
        return None
