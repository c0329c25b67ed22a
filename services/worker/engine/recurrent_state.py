"""The states that layers keep of each request beside its keys and values, by rows of its table.

A layer of linear attention has one state for a request, however long that is, and the last inputs
of its convolution (`Ops.delta_net`). States are in no block, so requests do not share them and
none can be taken back: a request begins at position 0, where a state is zeros, and every token that
runs changes it. What a request leaves in its row is of no use to the next one, which begins at
position 0 as well.
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
"""Requests that have states at a time, at most; of large models fewer have room."""


def state_bytes(config: ModelConfig, layers: range, *, dtype: torch.dtype, tp_size: int) -> int:
    """Returns the bytes that `layers` keep of a request on one rank; 0 where they keep nothing."""
    n_bytes = 0
    for sizes in (config.layer_states[i] for i in layers):
        if sizes is not None:
            mine = sizes.of_rank(tp_size)
            n_elements = mine.n_heads * mine.key_dim * mine.value_dim
            n_bytes += n_elements * torch.float32.itemsize
            n_bytes += mine.n_inputs * mine.n_channels * dtype.itemsize
    return n_bytes


class RecurrentState:
    """The states of `n_rows` requests, for the layers of a stage that keep any."""

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
        """Allocates the states of all rows, and one more for padding, whose results are not
        read."""
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
        """Returns where the states of `rows` are, [n_spans]; further spans are padding.

        Padding, and rows that have no states, as in a trial without any, have the last place.
        """
        places = np.full(n_spans, self._n_rows)
        places[: len(rows)] = np.minimum(rows, self._n_rows)
        return places


@dataclass(frozen=True, slots=True)
class Division:
    """How many blocks and states the memory of a rank has room for."""

    n_kv_blocks: int
    n_state_rows: int  # 0 where layers keep no states


def divide(memory_bytes: int, *, block_size: int, block_bytes: int, row_bytes: int) -> Division:
    """Divides a rank's memory for keys and values between blocks and the states of requests.

    States take up to half of it, since a request needs both. A stage all of whose layers keep
    states stores nothing in blocks, and has as many as there may be.

    Raises:
        CannotStart: it has no room for a block and for the states of one request.
    """
    n_rows = 0
    if row_bytes:
        share = memory_bytes // 2 if block_bytes else memory_bytes
        n_rows = max(1, min(MAX_STATE_ROWS, share // row_bytes - 1))
    rows_bytes = (n_rows + 1) * row_bytes if n_rows else 0  # with that of padding
    left = memory_bytes - rows_bytes
    if left < block_bytes or left < 0:
        states = f", and {rows_bytes} for the states of {n_rows} request" if n_rows else ""
        raise CannotStart(
            f"kv_memory: {memory_bytes} bytes are less than one block of {block_size} slots, "
            f"{block_bytes} bytes{states}"
        )
    return Division(left // block_bytes if block_bytes else MAX_KV_BLOCKS, n_rows)
