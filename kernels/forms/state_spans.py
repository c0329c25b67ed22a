"""The spans of a batch, described for layers that keep a state of fixed size for each request."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateSpans:
    """The tokens of each span of a batch, and the row of the states that belongs to the span's
    request.

    Columns are int64, dense and on the device. No two spans of a batch have the same row, except
    for spans whose results are not read.
    """

    first_tokens: Tensor  # [n_spans], the index of each span's first token in the batch
    n_tokens: Tensor  # [n_spans], at least 1
    rows: Tensor  # [n_spans], the row of the states that a span reads and updates
    start_positions: Tensor  # [n_spans], position of the first token; at 0 the state is zeros
