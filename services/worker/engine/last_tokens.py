"""The token that was sampled last for each row, on a rank that embeds and samples.

Plans leave such tokens out, because the rank has them before anybody else. On a GPU they stay on
the device, which nothing waits for. On a CPU they are the host's, as arrays: after weights have
gone through the caches, NumPy needs a quarter of PyTorch's time for so few numbers.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.upload import Uploads
from services.worker.engine.plan import Ints

Numbers = Ints | Tensor
"""Arrays on a CPU, tensors on the device else; int64."""


class LastTokens(Protocol):
    """A token for each row; those that nothing was sampled for are not to be asked for."""

    def grow(self, n_rows: int) -> None:
        """Takes in rows below `n_rows`."""

    def numbers(self, values: Ints, uploads: Uploads) -> Numbers:
        """Rows, or places in a batch, as the other calls take them; to be used when `uploads` have
        been flushed."""

    def keep(self, rows: Numbers, tokens: Numbers) -> None:
        """Keeps what was sampled for `rows`, both [n_sampled]; -1 says that nothing could be."""

    def put(self, token_ids: Tensor, places: Numbers, rows: Numbers) -> None:
        """Writes the tokens of `rows` to `places` of a batch `token_ids` [n_tokens].

        -1 becomes a token: it may be looked up before it is refused.
        """


def last_tokens(device: torch.device) -> LastTokens:
    """Those of no rows yet, where `device` has them."""
    return TokensOnHost() if device.type == "cpu" else TokensOnDevice(device)


class TokensOnHost:
    """See `LastTokens`."""

    def __init__(self) -> None:
        self._tokens: Ints = np.zeros(0, np.int64)  # [n_rows]

    def grow(self, n_rows: int) -> None:
        self._tokens = np.pad(self._tokens, (0, n_rows - len(self._tokens)))

    def numbers(self, values: Ints, uploads: Uploads) -> Numbers:
        return values

    def keep(self, rows: Numbers, tokens: Numbers) -> None:
        self._tokens[rows] = tokens

    def put(self, token_ids: Tensor, places: Numbers, rows: Numbers) -> None:
        token_ids.numpy()[places] = np.maximum(self._tokens[rows], 0)


class TokensOnDevice:
    """See `LastTokens`; waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._tokens = torch.zeros(0, dtype=torch.int64, device=device)  # [n_rows]

    def grow(self, n_rows: int) -> None:
        self._tokens = torch.nn.functional.pad(self._tokens, (0, n_rows - len(self._tokens)))

    def numbers(self, values: Ints, uploads: Uploads) -> Numbers:
        return uploads.add(values)

    def keep(self, rows: Numbers, tokens: Numbers) -> None:
        self._tokens.index_copy_(0, _tensor(rows), _tensor(tokens))

    def put(self, token_ids: Tensor, places: Numbers, rows: Numbers) -> None:
        tokens = self._tokens.index_select(0, _tensor(rows)).clamp_(min=0)
        token_ids.index_copy_(0, _tensor(places), tokens)


def _tensor(numbers: Numbers) -> Tensor:
    if not isinstance(numbers, Tensor):
        raise TypeError("numbers of the host on a device")
    return numbers
