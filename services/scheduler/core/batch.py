"""A batch: a set of requests that run one iteration together, and the updates that result."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from services.common.named_tuples import maker
from services.scheduler.core.memory.entry_changes import NO_CHANGES, Changes
from services.scheduler.core.request import FinishReason, Request
from services.scheduler.core.span_logprobs import SpanLogprobs


class Span(NamedTuple):
    """One request's part in a batch: consecutive tokens of its sequence.

    A prefill is a span of prompt tokens, either the whole prompt or a chunk. A decode is a span of
    one token. No code that receives spans needs to distinguish the two.
    """

    request: Request
    start_position: int
    n_tokens: int
    token_ids: Sequence[int]
    """Ids of the tokens. Empty if the span is one token that has not returned yet: then only the
    rank that sampled the token has it."""
    is_admission: bool
    """Whether the request is admitted with this span. If so, the ranks have not received the
    request before."""
    is_sampled: bool
    """Whether a token is sampled after the span. If so, the span reaches the end of the sequence.
    """
    new_block_ids: Sequence[int]
    """Ids of the blocks that the ranks append to the request's blocks. With an admission, these
    also include the blocks of the prefix cache that hold the tokens before the span."""
    n_drafts: int = 0
    """Number of tokens at the end of the span that are drafts (`drafting/`)."""


span_of = maker(Span)
"""Makes a span from a tuple of its fields."""


class SpanColumns(NamedTuple):
    """The spans of a batch in columns: one tuple for each field of `Span`."""

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
    """Rows of the ranks' request tables that became free since the previous batch."""
    n_drafts: int = 0
    """Number of drafts of all spans."""
    cache_changes: Changes = NO_CHANGES
    """Changes of the prefix cache since the previous batch."""
    columns: SpanColumns = field(init=False, repr=False, compare=False)
    """The spans in columns. Iterating over one field is several times faster here than over
    `spans`."""
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

    def with_requests(self, replacements: Mapping[Request, Request]) -> "Batch":
        """Returns a copy of the batch in which each request that is a key of `replacements` is
        replaced by its value."""
        spans = [
            span._replace(request=replacements.get(span.request, span.request))
            for span in self.spans
        ]
        return replace(self, spans=tuple(spans))

    def sampled_requests(self, places: Sequence[int]) -> Iterator[Request]:
        """Yields the requests to which some of the batch's sampled tokens belong. `places` are the
        indices of these tokens among all sampled tokens of the batch."""
        if places:
            requests = [
                span.request for span in self.spans for _ in range(span.is_sampled + span.n_drafts)
            ]
            yield from [requests[place] for place in places]


class Update(NamedTuple):
    """The effect of an iteration, or of a cancellation, on one request.

    An iteration that verifies drafts of a request may lead to several updates of the request, one
    for each token.
    """

    request: Request
    token_id: int | None
    finish_reason: FinishReason | None
    n_generated: int
    """Number of output tokens, up to and including the token of this update."""
    message: str = ""
    """Reason why the request failed, for people to read."""
    logprobs: SpanLogprobs | None = None
    """The log-probabilities that the request asked for; None if there are none. An update without a
    token may have log-probabilities of prompt tokens."""


update_of = maker(Update)
"""Makes an update from a tuple of its fields."""
