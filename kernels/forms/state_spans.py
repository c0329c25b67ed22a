"""The spans of a batch as layers see them that keep a state of each request."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateSpans:
    """Where each span of a batch lies, and the row of the layers' states that it goes on with.

    Columns are int64, dense and on the device. Spans of one batch have different rows, except for
    spans whose results are not read.
    """

    first_tokens: Tensor  # [n_spans], places in the batch
    n_tokens: Tensor  # [n_spans], one at least
    rows: Tensor  # [n_spans]
    start_positions: Tensor  # [n_spans], of first tokens in their sequences; at 0 a state is zeros
