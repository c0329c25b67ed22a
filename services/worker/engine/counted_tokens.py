"""Selects the tokens of a batch that must be counted for penalties."""

from __future__ import annotations

import numpy as np

from kernels.upload import Uploads
from services.worker.engine.plan import Ints, Spans, ranges
from services.worker.engine.request_table import RequestTable
from services.worker.engine.token_counts import NOT_COUNTED, CountedTokens


def counted_tokens(
    table: RequestTable, spans: Spans, first_tokens: Ints, uploads: Uploads
) -> CountedTokens | None:
    """Returns the tokens of a batch that must be counted for penalties, or None if no request of
    the batch has penalties. `first_tokens` [n_spans] are the indices in the batch at which `spans`
    begin."""
    count_rows = table.count_rows(spans.rows)
    if count_rows is None:
        return None
    counted = np.flatnonzero(count_rows != NOT_COUNTED)
    n_tokens = spans.n_tokens[counted]
    n_prompt = table.n_prompt_tokens(spans.rows[counted]) - spans.start_positions[counted]
    n_prompt = np.clip(n_prompt, 0, n_tokens)
    firsts, count_rows = first_tokens[counted], count_rows[counted]
    return CountedTokens(
        prompt_tokens=uploads.add(ranges(firsts, n_prompt)),
        prompt_rows=uploads.add(np.repeat(count_rows, n_prompt)),
        generated_tokens=uploads.add(ranges(firsts + n_prompt, n_tokens - n_prompt)),
        generated_rows=uploads.add(np.repeat(count_rows, n_tokens - n_prompt)),
    )
