"""Log-probabilities, for requests that ask for them.

A log-probability is the logarithm of the softmax of the model's logits in float32, without
penalties, biases, masks and filters. So it depends neither on the request's sampling options nor on
the rest of the batch. For sampled tokens, the caller passes the logits. For the tokens of a prompt,
this module computes the logits from the hidden states, a few rows at a time, because the logits of
all tokens might not fit in memory.

This module does not depend on the model: the caller passes a function that computes the logits of
rows of hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.upload import Uploads
from services.worker.engine.last_tokens import Numbers
from services.worker.engine.plan import Admission, Ints, PlanError, Spans

ROWS_AT_ONCE = 64
"""Number of rows of logits that are processed together. The limit bounds the memory for copies of
logits."""


@dataclass(frozen=True, slots=True)
class LogprobSpan:
    """The tokens of one span for which log-probabilities are computed."""

    span: int  # index of the span in the plan
    n_tokens: int
    n_top: int  # number of alternatives for each token
    prompt_position: int | None  # position of the first token; None for a sampled token


@dataclass(frozen=True, slots=True)
class WantedLogprobs:
    """The tokens of a batch for which log-probabilities are computed: `n_sampled` sampled tokens,
    then tokens of prompts, span by span."""

    spans: tuple[LogprobSpan, ...]
    n_sampled: int
    sampled_places: Tensor  # [n_sampled] int64, indices among the sampled tokens of the batch
    prompt_places: Tensor  # [n_prompt] int64, index in the batch of the token before each token
    prompt_tokens: Tensor  # [n_prompt] int64, the tokens

    @property
    def n_top(self) -> int:
        """The largest number of most likely tokens that a span asks for."""
        return max(span.n_top for span in self.spans)

    @property
    def of_prompts(self) -> bool:
        """Whether log-probabilities are computed for a token of a prompt."""
        return len(self.prompt_places) > 0


@dataclass(frozen=True, slots=True)
class LogprobColumns:
    """Log-probabilities and ranks of some tokens. For each of these tokens, also the `n_top` most
    likely tokens at its position."""

    logprobs: Tensor  # [n] float32
    ranks: Tensor  # [n] int64, from 1
    top_ids: Tensor  # [n, n_top] int64, most likely first
    top_logprobs: Tensor  # [n, n_top] float32

    @classmethod
    def of(cls, logits: Tensor, tokens: Tensor, *, n_top: int) -> LogprobColumns:
        """Computes, from `logits` [n, vocab_size], the log-probability of each of `tokens` [n], and
        the `n_top` most likely tokens at its position with their log-probabilities."""
        logits = logits.float()
        total = logits.logsumexp(-1)
        # A token of -1 stands for logits that are not finite; its request fails afterwards.
        chosen = logits.gather(1, tokens.clamp(min=0)[:, None])[:, 0]
        top, top_ids = logits.topk(min(n_top, logits.shape[1]))
        ranks = (logits > chosen[:, None]).sum(-1) + 1
        return cls(chosen - total, ranks, top_ids, top - total[:, None])

    @classmethod
    def joined(cls, parts: list[LogprobColumns]) -> LogprobColumns:
        """Concatenates the log-probabilities of all `parts`, in order."""
        return cls(
            torch.cat([part.logprobs for part in parts]),
            torch.cat([part.ranks for part in parts]),
            torch.cat([part.top_ids for part in parts]),
            torch.cat([part.top_logprobs for part in parts]),
        )

    def to_host(self) -> LogprobColumns:
        """Starts to copy the columns to host memory, and returns the copy. The copy may be read
        when the device has finished."""
        return LogprobColumns(
            self.logprobs.to("cpu", non_blocking=True),
            self.ranks.to("cpu", non_blocking=True),
            self.top_ids.to("cpu", non_blocking=True),
            self.top_logprobs.to("cpu", non_blocking=True),
        )


@dataclass(frozen=True, slots=True)
class ReportedSpan:
    """The log-probabilities of one span, on the host."""

    of: LogprobSpan
    logprobs: NDArray[np.float32]  # [n_tokens]
    ranks: NDArray[np.int64]  # [n_tokens]
    top_ids: NDArray[np.int64]  # [n_tokens, n_top]
    top_logprobs: NDArray[np.float32]  # [n_tokens, n_top]


@dataclass(frozen=True, slots=True)
class BatchLogprobs:
    """The log-probabilities of a batch's tokens, and the spans to which they belong."""

    spans: tuple[LogprobSpan, ...]
    columns: LogprobColumns

    def to_host(self) -> BatchLogprobs:
        """Starts to copy the log-probabilities to host memory, and returns the copy. The copy may
        be read when the device has finished."""
        return BatchLogprobs(self.spans, self.columns.to_host())

    def by_span(self) -> Iterator[ReportedSpan]:
        """Yields the log-probabilities of each span. Call it on the result of `to_host`, when the
        copy has arrived."""
        columns = self.columns
        logprobs, ranks = columns.logprobs.numpy(), columns.ranks.numpy()
        top_ids, top_logprobs = columns.top_ids.numpy(), columns.top_logprobs.numpy()
        end = 0
        for span in self.spans:
            rows, end = slice(end, end + span.n_tokens), end + span.n_tokens
            yield ReportedSpan(
                span,
                logprobs[rows],
                ranks[rows],
                top_ids[rows, : span.n_top],
                top_logprobs[rows, : span.n_top],
            )


class LogprobRequests:
    """Records which requests of a rank's table ask for log-probabilities, by row."""

    def __init__(self, *, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._n_sampled: dict[int, int] = {}  # by row: alternatives for each sampled token
        # By row: alternatives for each token of the prompt, and the length of the prompt.
        self._n_prompt: dict[int, tuple[int, int]] = {}

    def admit(self, admission: Admission) -> None:
        """Records which log-probabilities a new request asks for."""
        if admission.n_logprobs is not None:
            self._n_sampled[admission.row] = admission.n_logprobs
        if admission.n_prompt_logprobs is not None:
            wanted = (admission.n_prompt_logprobs, admission.n_prompt_tokens)
            self._n_prompt[admission.row] = wanted

    def release(self, row: int) -> None:
        """Removes the request of a row."""
        self._n_sampled.pop(row, None)
        self._n_prompt.pop(row, None)

    def check(self, spans: Spans) -> None:
        """Raises PlanError unless the plan has as many `next_token_ids` as its spans need, and all
        of them are tokens of the vocabulary."""
        n_given = len(spans.next_token_ids)
        if not n_given and not self._n_prompt:
            return
        n_needed = sum(
            row in self._n_prompt and end < self._n_prompt[row][1]
            for row, end in zip(
                spans.rows.tolist(), (spans.start_positions + spans.n_tokens).tolist(), strict=True
            )
        )
        if n_given != n_needed:
            raise PlanError(f"next_token_ids has {n_given} entries where {n_needed} are needed")
        if n_given and int(spans.next_token_ids.max()) >= self._vocab_size:
            raise PlanError(f"next_token_ids are not in [0, {self._vocab_size})")

    def are_of_sampled(self, row: int) -> bool:
        """Returns whether the request of a row asks for log-probabilities of sampled tokens."""
        return row in self._n_sampled

    def are_of_prompts(self, spans: Spans) -> bool:
        """Returns whether log-probabilities of prompt tokens must be computed for any of
        `spans`."""
        return bool(self._n_prompt) and any(True for _ in self._prompts(spans))

    def wanted(self, spans: Spans, first_tokens: Ints, uploads: Uploads) -> WantedLogprobs | None:
        """Returns the tokens of a batch for which log-probabilities must be computed, or None if
        there are none.

        `first_tokens` [n_spans] are the indices in the batch at which spans begin. The tensors are
        readable after `uploads` has been flushed.
        """
        if not self._n_sampled and not self._n_prompt:
            return None
        found: list[LogprobSpan] = []
        places: list[int] = []
        n_top_of = self._n_sampled
        sampled = spans.sampled()
        for place, (span, row) in enumerate(
            zip(sampled.spans.tolist(), sampled.rows.tolist(), strict=True)
        ):
            if row in n_top_of:
                found.append(LogprobSpan(span, 1, n_top_of[row], None))
                places.append(place)
        before, tokens = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for of, first_sent, next_token in self._prompts(spans):
            found.append(of)
            before.append(np.arange(of.n_tokens) + first_tokens[of.span])
            tokens.append(spans.token_ids[first_sent + 1 : first_sent + 1 + of.n_tokens])
            if next_token is not None:
                tokens[-1] = np.append(tokens[-1][: of.n_tokens - 1], next_token)
        if not found:
            return None
        return WantedLogprobs(
            spans=tuple(found),
            n_sampled=len(places),
            sampled_places=uploads.add(np.array(places, np.int64)),
            prompt_places=uploads.add(np.concatenate(before)),
            prompt_tokens=uploads.add(np.concatenate(tokens)),
        )

    def _prompts(self, spans: Spans) -> Iterator[tuple[LogprobSpan, int, int | None]]:
        """Yields each span of a prompt whose log-probabilities must be computed, the index of the
        span's first token in `token_ids`, and the prompt token after the span. This token is None
        if the span ends the prompt."""
        if not self._n_prompt:
            return
        end_sent = n_next = 0
        for span, (row, start, n_tokens, is_left_out) in enumerate(
            zip(
                spans.rows.tolist(),
                spans.start_positions.tolist(),
                spans.n_tokens.tolist(),
                spans.token_on_rank.tolist(),
                strict=True,
            )
        ):
            first_sent, end_sent = end_sent, end_sent + (0 if is_left_out else n_tokens)
            if row not in self._n_prompt:
                continue
            n_top, n_prompt = self._n_prompt[row]
            next_token = None
            if start + n_tokens < n_prompt:
                next_token, n_next = int(spans.next_token_ids[n_next]), n_next + 1
            n_wanted = min(n_tokens, n_prompt - 1 - start)
            if n_wanted > 0:
                yield LogprobSpan(span, n_wanted, n_top, start + 1), first_sent, next_token


def logprobs_of(
    wanted: WantedLogprobs,
    sampled_logits: Tensor,
    sampled_tokens: Numbers,
    *,
    logits_at: Callable[[Tensor], Tensor],
) -> BatchLogprobs:
    """Returns the log-probabilities of the tokens in `wanted`.

    `sampled_logits` are [n_sampled, vocab_size], `sampled_tokens` are [n_sampled].
    `logits_at(places)` returns the logits [n, vocab_size] that follow the tokens at the indices
    `places` [n] of the batch.
    """
    n_top, parts = wanted.n_top, []
    if wanted.n_sampled:
        tokens = torch.as_tensor(sampled_tokens)
        for some in _pieces(wanted.n_sampled):
            places = wanted.sampled_places[some]
            rows, chosen = sampled_logits.index_select(0, places), tokens.index_select(0, places)
            parts.append(LogprobColumns.of(rows, chosen, n_top=n_top))
    for some in _pieces(len(wanted.prompt_places)):
        rows = logits_at(wanted.prompt_places[some])
        parts.append(LogprobColumns.of(rows, wanted.prompt_tokens[some], n_top=n_top))
    return BatchLogprobs(wanted.spans, LogprobColumns.joined(parts))


def _pieces(n_rows: int) -> Iterator[slice]:
    return (slice(start, start + ROWS_AT_ONCE) for start in range(0, n_rows, ROWS_AT_ONCE))
