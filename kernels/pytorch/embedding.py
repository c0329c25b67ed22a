"""Rows of a rank's share of a table of tokens."""

import torch.nn.functional as F
from torch import Tensor


def embedding(table: Tensor, token_ids: Tensor, first: int) -> Tensor:
    """Returns the rows [n_tokens, size] of `table` [n_rows, size] for `token_ids` [n_tokens].

    The table has the rows of tokens `first` to `first + n_rows`, and may have none; the rows of
    other tokens are zeros.
    """
    rows = token_ids - first
    is_elsewhere = (rows < 0) | (rows >= len(table))
    if not len(table):
        return table.new_zeros(len(rows), table.shape[1])
    found = F.embedding(rows.masked_fill(is_elsewhere, 0), table)  # [n_tokens, size]
    return found.masked_fill_(is_elsewhere[:, None], 0)
