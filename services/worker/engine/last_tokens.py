"""The last sampled token of each row, on a rank that embeds and samples.

Plans leave such tokens out, because the rank has sampled them itself. On a GPU the tokens stay on
the device, and the host does not wait for them. On a CPU the tokens are in NumPy arrays. For arrays
of a few elements NumPy takes a quarter of PyTorch's time, because reading the weights has displaced
the libraries' code from the processor's caches.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.upload import Uploads
from services.worker.engine.plan import Ints

Numbers = Ints | Tensor
"""An int64 array on a CPU, an int64 tensor on any other device."""


class LastTokens(Protocol):
    """Stores the last sampled token of each row of the request table. A row must not be read before
    a token has been sampled for it."""

    def grow(self, n_rows: int) -> None:
        """Makes the store hold at least `n_rows` rows."""

    def numbers(self, values: Ints, uploads: Uploads) -> Numbers:
        """Converts rows of the table, or indices in a batch, to the type that the other methods
        take.

        The result may be used after `uploads` has been flushed.
        """

    def keep(self, rows: Numbers, tokens: Numbers) -> None:
        """Stores `tokens` as the last tokens of `rows`, both [n_sampled]. A token is -1 if its
        logits were not finite."""

    def put(self, token_ids: Tensor, places: Numbers, rows: Numbers) -> None:
        """Writes the last tokens of `rows` [n] to the indices `places` [n] of a batch's `token_ids`
        [n_tokens].

        A last token of -1 is written as 0, because the device may embed the token before the host
        has read it and has failed the request.
        """


def last_tokens(device: torch.device) -> LastTokens:
    """Returns an empty store of last tokens for `device`."""
    return TokensOnHost() if device.type == "cpu" else TokensOnDevice(device)


class TokensOnHost:
    """The last tokens of rows in a NumPy array, for a CPU."""

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
    """The last tokens of rows in a tensor on the device. No method waits for the device."""

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
