"""Paged storage for the keys and values of one stage's layers, for the heads of one rank.

It only stores. The scheduler's K/V manager decides which block belongs to which request, for all
stages: a block id means the same page of slots in every layer of every stage.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.worker.models.config import ModelConfig
from services.worker.models.tensor_parallel import HeadShare


def kv_block_bytes(
    config: ModelConfig, n_layers: int, *, block_size: int, dtype: torch.dtype, tp_size: int
) -> int:
    """Returns the bytes of one block on one rank: keys and values of its slots in `n_layers`
    layers."""
    n_kv_heads = len(HeadShare.of(config, 0, tp_size).kv)  # as many on every rank
    return 2 * n_layers * block_size * n_kv_heads * config.head_dim * dtype.itemsize


class KVCache:
    """Keys and values of `n_blocks` blocks for each layer of a stage."""

    def __init__(
        self,
        config: ModelConfig,
        n_layers: int,
        *,
        n_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        tp_size: int = 1,
    ) -> None:
        """Allocates all blocks at once, and zeroes them: attention reads slots beyond a sequence's
        end with weight zero, and zero times whatever was left in memory may be NaN."""
        n_kv_heads = len(HeadShare.of(config, 0, tp_size).kv)  # as many on every rank
        shape = (n_blocks, block_size, n_kv_heads, config.head_dim)
        self.n_blocks = n_blocks
        self.block_size = block_size
        self.layers: tuple[tuple[Tensor, Tensor], ...] = tuple(
            (
                torch.zeros(shape, dtype=dtype, device=device),
                torch.zeros(shape, dtype=dtype, device=device),
            )
            for _ in range(n_layers)
        )
