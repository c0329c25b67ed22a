"""Makes vectors (embeddings or scores), for requests that ask for a vector instead of tokens.

A request's prompt may take several iterations. Between them, this module keeps, for the request's
row, one hidden state that stands for the tokens so far; for the mean it is a running sum. The state
is dropped when the row is released, so a request that is computed again begins anew.

Sums are computed token by token in float64, so that a vector depends neither on where the prompt
was cut nor on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.upload import Uploads
from services.common.pooling import Pooling, PoolingKind
from services.worker.engine.plan import Admission, Ints, PlanError, Spans

ROWS_AT_ONCE = 512
"""Number of hidden states that are added together. The limit bounds the memory for copies."""


class StatePooling(Protocol):
    """A way to combine the hidden states of a prompt's tokens into one."""

    def needed(self, start: int, n_tokens: int, n_prompt: int) -> range:
        """Returns the tokens of a span whose states are needed, as indices within the span. The
        span has `n_tokens` tokens and begins at the position `start` of a prompt of `n_prompt`
        tokens."""

    def add(self, kept: Tensor | None, states: Tensor) -> Tensor:
        """Returns the state to keep [hidden_size] after the needed states [n, hidden_size] of a
        span. `kept` is the state after the previous spans; None if no state has been needed yet."""

    def end(self, kept: Tensor, n_prompt: int) -> Tensor:
        """Returns the state that stands for the whole prompt of `n_prompt` tokens."""


class LastToken:
    """Takes the state of the last token of a prompt."""

    def needed(self, start: int, n_tokens: int, n_prompt: int) -> range:
        return range(n_tokens - 1, n_tokens) if start + n_tokens == n_prompt else range(0)

    def add(self, kept: Tensor | None, states: Tensor) -> Tensor:
        return states[-1]

    def end(self, kept: Tensor, n_prompt: int) -> Tensor:
        return kept


class FirstToken:
    """Takes the state of the first token of a prompt."""

    def needed(self, start: int, n_tokens: int, n_prompt: int) -> range:
        return range(1) if start == 0 else range(0)

    def add(self, kept: Tensor | None, states: Tensor) -> Tensor:
        return states[0]

    def end(self, kept: Tensor, n_prompt: int) -> Tensor:
        return kept


class Mean:
    """Takes the mean of the states of all tokens of a prompt."""

    def needed(self, start: int, n_tokens: int, n_prompt: int) -> range:
        return range(n_tokens)

    def add(self, kept: Tensor | None, states: Tensor) -> Tensor:
        total = states.new_zeros(states.shape[1], dtype=torch.float64) if kept is None else kept
        for some in torch.split(states, ROWS_AT_ONCE):
            rows = torch.cat((total[None], some.double()))
            total = rows.cumsum(0)[-1]  # one row after the other, unlike `sum`
        return total

    def end(self, kept: Tensor, n_prompt: int) -> Tensor:
        return kept / n_prompt


_POOLING: Mapping[PoolingKind, StatePooling] = {
    "last": LastToken(),
    "cls": FirstToken(),
    "mean": Mean(),
}


@dataclass(slots=True)
class _PooledRequest:
    """A request that asks for a vector, and the state that stands for its tokens so far."""

    pooling: StatePooling
    n_prompt: int
    kept: Tensor | None = None  # [hidden_size]


@dataclass(frozen=True, slots=True)
class PooledSpan:
    """A span of a request that asks for a vector: the number of its tokens whose hidden states are
    needed, and whether the prompt ends with this span."""

    span: int  # index of the span in the plan
    row: int
    n_tokens: int  # of which states are needed
    ends_prompt: bool


@dataclass(frozen=True, slots=True)
class WantedStates:
    """The tokens of a batch whose hidden states are needed for vectors: how many each span has, and
    the indices of all of them, one span after the other."""

    spans: tuple[PooledSpan, ...]
    places: Tensor  # [n] int64, indices of the tokens in the batch


@dataclass(frozen=True, slots=True)
class BatchVectors:
    """The vectors of the prompts that end in a batch, and the indices of their spans."""

    spans: tuple[int, ...]
    values: Tensor  # [n_vectors, n_values] float32

    def to_host(self) -> BatchVectors:
        """Starts to copy the vectors to host memory, and returns the copy. The copy may be read
        when the device has finished."""
        return BatchVectors(self.spans, self.values.to("cpu", non_blocking=True))

    def by_span(self) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yields the index of each span and its vector. Call it on the result of `to_host`, when
        the copy has arrived."""
        yield from zip(self.spans, self.values.numpy(), strict=True)


class PooledRequests:
    """Keeps the requests that ask for vectors, by row, and combines the states of their tokens."""

    def __init__(self, pooling: Pooling | None) -> None:
        """`pooling` is None if the rank makes no vectors."""
        self._pooling = pooling
        self._runs_whole = pooling is not None and pooling.runs_whole
        self._requests: dict[int, _PooledRequest] = {}

    def admit(self, admission: Admission) -> None:
        """Records a new request, if it asks for a vector. Raises PlanError if its vector cannot be
        made."""
        if not admission.wants_vector:
            return
        if self._pooling is None:
            raise PlanError(f"admitted row {admission.row} wants a vector, which the model lacks")
        if admission.stored_token_ids and self._pooling.needs_all_states:
            raise PlanError(f"admitted row {admission.row} has stored tokens without states")
        self._requests[admission.row] = _PooledRequest(
            _POOLING[self._pooling.kind], admission.n_prompt_tokens
        )

    def release(self, row: int) -> None:
        """Removes the request of a row."""
        self._requests.pop(row, None)

    def are_in(self, spans: Spans) -> bool:
        """Returns whether one of `spans` belongs to a request that asks for a vector."""
        return bool(self._requests) and not self._requests.keys().isdisjoint(spans.rows.tolist())

    def wanted(self, spans: Spans, first_tokens: Ints, uploads: Uploads) -> WantedStates | None:
        """Returns the tokens of a batch whose states are needed, or None if there are none. Raises
        PlanError if the model needs whole prompts and a span has only part of a prompt.

        `first_tokens` [n_spans] are the indices in the batch at which spans begin. The tensor is
        readable after `uploads` has been flushed.
        """
        if not self._requests:
            return None
        found: list[PooledSpan] = []
        places: list[Ints] = []
        columns = zip(
            spans.rows.tolist(),
            spans.start_positions.tolist(),
            spans.n_tokens.tolist(),
            strict=True,
        )
        for span, (row, start, n_tokens) in enumerate(columns):
            request = self._requests.get(row)
            if request is None:
                continue
            if self._runs_whole and (start, n_tokens) != (0, request.n_prompt):
                raise PlanError(
                    f"row {row} has {n_tokens} of {request.n_prompt} tokens from {start} on, and "
                    "the model must get a text whole"
                )
            needed = request.pooling.needed(start, n_tokens, request.n_prompt)
            ends_prompt = start + n_tokens == request.n_prompt
            if needed or ends_prompt:
                found.append(PooledSpan(span, row, len(needed), ends_prompt))
                places.append(np.arange(needed.start, needed.stop) + first_tokens[span])
        return WantedStates(tuple(found), uploads.add(np.concatenate(places))) if found else None

    def pool(self, wanted: WantedStates, states: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Adds the normalised states [n, hidden_size] of the tokens in `wanted` to their requests.
        Yields, for each prompt that ends, the index of its span and the state [hidden_size] that
        stands for the prompt. Raises PlanError if a prompt ends without a state, because plans have
        left out the token that it needs."""
        end = 0
        for span in wanted.spans:
            request = self._requests[span.row]
            rows, end = slice(end, end + span.n_tokens), end + span.n_tokens
            if span.n_tokens:
                request.kept = request.pooling.add(request.kept, states[rows])
            if not span.ends_prompt:
                continue
            if request.kept is None:
                raise PlanError(f"row {span.row} has no state for its vector")
            yield span.span, request.pooling.end(request.kept, request.n_prompt)
