"""The recurrent states of requests, by row. Some layers keep such states instead of keys and
values.

A layer of linear attention has one state of fixed size for each request, and the last inputs of its
convolution (`Ops.delta_net`). States are not in blocks. So requests cannot share states, and no
token can be undone: a request begins at position 0 with a state of zeros, and every token that runs
changes the state. The next request of a row also begins at position 0, so a row need not be cleared
when its request ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.ops import LayerKV
from services.common.cannot_start import CannotStart
from services.common.protocol import MAX_KV_BLOCKS
from services.worker.engine.plan import Ints
from services.worker.models.config import ModelConfig

MAX_STATE_ROWS = 256
"""Largest number of requests that have recurrent states at a time. For large models, memory allows
fewer."""


def state_bytes(config: ModelConfig, layers: range, *, dtype: torch.dtype, tp_size: int) -> int:
    """Returns the number of bytes of the states that `layers` keep of one request on one rank.
    Returns 0 if no layer keeps a state."""
    n_bytes = 0
    for sizes in (config.layer_states[i] for i in layers):
        if sizes is not None:
            mine = sizes.of_rank(tp_size)
            n_elements = mine.n_heads * mine.key_dim * mine.value_dim
            n_bytes += n_elements * torch.float32.itemsize
            n_bytes += mine.n_inputs * mine.n_channels * dtype.itemsize
    return n_bytes


class RecurrentState:
    """The states of `n_rows` requests, for the layers of a stage that keep states."""

    def __init__(
        self,
        config: ModelConfig,
        layers: range,
        *,
        n_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        tp_size: int = 1,
    ) -> None:
        """Allocates the states of all rows, and one additional state for padding."""
        self._n_rows = n_rows
        self.layers: Sequence[LayerKV | None] = tuple(
            None
            if sizes is None
            else (
                torch.zeros(
                    (n_rows + 1, sizes.n_inputs, sizes.n_channels), dtype=dtype, device=device
                ),
                torch.zeros(
                    (n_rows + 1, sizes.n_heads, sizes.key_dim, sizes.value_dim), device=device
                ),
            )
            for sizes in (
                None if whole is None else whole.of_rank(tp_size)
                for whole in (config.layer_states[i] for i in layers)
            )
        )

    @property
    def is_empty(self) -> bool:
        """Whether no layer keeps a state."""
        return all(layer is None for layer in self.layers)

    def places(self, rows: Ints, n_spans: int) -> Ints:
        """Returns the index of the state of each span in a batch, [n_spans]. The first spans belong
        to `rows`.

        Spans after `rows` are padding, and have the last index. Rows beyond the number of states
        also have the last index: in a trial iteration, which has no states of requests, all rows
        do.
        """
        places = np.full(n_spans, self._n_rows)
        places[: len(rows)] = np.minimum(rows, self._n_rows)
        return places


@dataclass(frozen=True, slots=True)
class Division:
    """The numbers of K/V blocks and of state rows that fit into the memory of a rank."""

    n_kv_blocks: int
    n_state_rows: int  # 0 if no layer keeps states


def divide(memory_bytes: int, *, block_size: int, block_bytes: int, row_bytes: int) -> Division:
    """Divides a rank's memory for keys and values between blocks and the states of requests.

    States take at most half of the memory, because a request needs blocks, too. They take more only
    if the states of a single request need more than half. If all layers of a stage keep states, its
    blocks take no memory, and the number of blocks is MAX_KV_BLOCKS.

    Raises:
        CannotStart: the memory is too small for one block and the states of one request.
    """
    n_rows = 0
    if row_bytes:
        share = memory_bytes // 2 if block_bytes else memory_bytes
        n_rows = max(1, min(MAX_STATE_ROWS, share // row_bytes - 1))
    rows_bytes = (n_rows + 1) * row_bytes if n_rows else 0  # includes the row of padding
    left = memory_bytes - rows_bytes
    if left < block_bytes or left < 0:
        states = f", and {rows_bytes} for the states of {n_rows} request" if n_rows else ""
        raise CannotStart(
            f"kv_memory: {memory_bytes} bytes are less than one block of {block_size} slots, "
            f"{block_bytes} bytes{states}"
        )
    return Division(left // block_bytes if block_bytes else MAX_KV_BLOCKS, n_rows)
