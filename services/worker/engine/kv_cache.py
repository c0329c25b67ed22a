"""Paged storage for the keys and values of one stage's layers, for the heads of one rank.

It only stores. The scheduler's K/V manager decides which block belongs to which request, for all
stages: a block id means the same page of slots in every layer of every stage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from services.worker.models.config import ModelConfig


def kv_block_bytes(
    config: ModelConfig, layers: range, *, block_size: int, dtype: torch.dtype, tp_size: int
) -> int:
    """Returns the bytes of one block on one rank: keys and values of its slots in `layers`."""
    sizes = (config.layer_kv[i].of_rank(tp_size) for i in layers)
    n_elements = sum(each.n_heads * (each.key_dim + each.value_dim) for each in sizes)
    return block_size * n_elements * dtype.itemsize


class KVCache:
    """Keys and values of `n_blocks` blocks for each layer of a stage."""

    def __init__(
        self,
        config: ModelConfig,
        layers: range,
        *,
        n_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        tp_size: int = 1,
    ) -> None:
        """Allocates all blocks at once, and zeroes them: attention reads slots beyond a sequence's
        end with weight zero, and zero times whatever was left in memory may be NaN."""
        self.n_blocks = n_blocks
        self.block_size = block_size
        own = {}
        for i in layers:
            n_heads, *dims = dataclasses.astuple(config.layer_kv[i].of_rank(tp_size))
            keys, values = (
                torch.zeros((n_blocks, block_size, n_heads, dim), dtype=dtype, device=device)
                for dim in dims
            )
            own[i] = keys, values
        self.layers: tuple[tuple[Tensor, Tensor], ...] = tuple(
            own[config.kv_sources[i]] for i in layers
        )
        """Keys and values that each layer attends to: its own, or an earlier layer's."""

    def key_caches(self) -> Sequence[Tensor]:
        """Returns the keys of the first layer of each kind of heads, one at least if any stores."""
        of_kind: dict[torch.Size, Tensor] = {}
        for keys, _ in self.layers:
            if keys.numel():
                of_kind.setdefault(keys.shape, keys)
        return list(of_kind.values())
