"""Looks up tokens in one rank's share of an embedding table."""

import torch.nn.functional as F
from torch import Tensor


def embedding(table: Tensor, token_ids: Tensor, first: int) -> Tensor:
    """Returns the rows [n_tokens, size] of `table` [n_rows, size] for `token_ids` [n_tokens].

    The table holds the rows of the tokens `first` to `first + n_rows - 1`. `n_rows` may be 0. Other
    tokens get zeros.
    """
    rows = token_ids - first
    is_elsewhere = (rows < 0) | (rows >= len(table))
    if not len(table):
        return table.new_zeros(len(rows), table.shape[1])
    found = F.embedding(rows.masked_fill(is_elsewhere, 0), table)  # [n_tokens, size]
    return found.masked_fill_(is_elsewhere[:, None], 0)
