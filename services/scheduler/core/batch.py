"""A set of requests that run one iteration together, and what it brings them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from services.common.named_tuples import maker
from services.scheduler.core.request import FinishReason, Request


class Span(NamedTuple):
    """One request's part in a batch: consecutive tokens of its sequence.

    A prefill is a span of the prompt, whole or a chunk of it, a decode a span of one token; nothing
    downstream needs to know which is which.
    """

    request: Request
    start_position: int
    n_tokens: int
    token_ids: Sequence[int]
    """The tokens; empty if the span's one token is still on the rank that sampled it."""
    is_admission: bool
    """Whether the request is new to the ranks."""
    is_sampled: bool
    """Whether a token is sampled after the span, which reaches the end of the sequence then."""
    new_block_ids: Sequence[int]
    """Blocks that the ranks append to the request's blocks; with an admission, also the blocks of
    the prefix cache, which hold the tokens before the span."""
    n_drafts: int = 0
    """Number of tokens at the end of the span that are drafts (`drafting/`)."""


span_of = maker(Span)
"""Makes a span of its fields."""


class SpanLogprobs(NamedTuple):
    """Log-probabilities that a span brought, serialised by a rank for frontends."""

    sampled: bytes = b""
    """Log-probabilities of the sampled token, if they are wanted."""
    prompt: tuple[tuple[int, bytes], ...] = ()
    """Log-probabilities of prompt tokens, if they are wanted: pieces, each with the position of its
    first token."""


NO_LOGPROBS: Mapping[int, SpanLogprobs] = MappingProxyType({})


class SpanColumns(NamedTuple):
    """The spans of a batch, each field as a column."""

    requests: tuple[Request, ...] = ()
    start_positions: tuple[int, ...] = ()
    n_tokens: tuple[int, ...] = ()
    token_ids: tuple[Sequence[int], ...] = ()
    is_admission: tuple[bool, ...] = ()
    is_sampled: tuple[bool, ...] = ()
    new_block_ids: tuple[Sequence[int], ...] = ()
    n_drafts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """The requests of one iteration, each with its span."""

    iteration: int
    spans: tuple[Span, ...]
    released_rows: tuple[int, ...]
    """Rows of the ranks' request tables that were given up since the previous batch."""
    n_drafts: int = 0
    """Number of drafts of all spans."""
    columns: SpanColumns = field(init=False, repr=False, compare=False)
    """The spans in columns: to go through one of their fields takes a fraction of the time."""
    n_tokens: int = field(init=False)
    """Number of tokens of all spans."""

    def __post_init__(self) -> None:
        columns = SpanColumns(*zip(*self.spans, strict=True))
        object.__setattr__(self, "columns", columns)
        object.__setattr__(self, "n_tokens", sum(columns.n_tokens))

    @property
    def n_sampled(self) -> int:
        """Number of spans after which a token is sampled."""
        return sum(self.columns.is_sampled)

    def sampled_requests(self, places: Sequence[int]) -> Iterator[Request]:
        """Yields the requests of some of the tokens that the batch brings, by the tokens' places
        among all of them."""
        if places:
            requests = [
                span.request for span in self.spans for _ in range(span.is_sampled + span.n_drafts)
            ]
            yield from [requests[place] for place in places]


class Update(NamedTuple):
    """The effect of an iteration, or of a cancellation, on one request. An iteration with drafts of
    a request may have several, one for each token."""

    request: Request
    token_id: int | None
    finish_reason: FinishReason | None
    n_generated: int
    """Tokens of the output, up to and including this one."""
    message: str = ""
    """Why the request failed, for people."""
    logprobs: SpanLogprobs | None = None
    """The log-probabilities that the request wants; there may be some of its prompt without a
    token."""


update_of = maker(Update)
"""Makes an update of its fields."""
