"""Paged storage for the keys and values of one stage's layers, for the heads of one rank.

The scheduler's K/V manager decides, for all stages at once, to which request and to which group of
layers a block belongs. A block id stands for the same slots on all stages. Layers of different
groups share storage, because a block belongs to one group at a time.

An encoder needs the keys and values of a layer only while that layer runs, so all layers of a stage
use the same storage one after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from services.worker.models.config import KVSizes, ModelConfig
from services.worker.models.kv_groups import KVGroups

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""A function that takes a shape and an element type, and returns a tensor without NaNs."""

_NOWHERE = -1
"""Place (see `_place_of_each`) of a layer that neither stores keys and values nor uses the keys and
values of an earlier layer."""


def kv_block_bytes(
    config: ModelConfig, layers: range, *, block_size: int, dtype: torch.dtype, tp_size: int
) -> int:
    """Returns the number of bytes of one K/V block on one rank. A block holds the keys and values
    of its slots for the layers of one K/V group."""
    n_elements = sum(
        each.n_heads * (each.key_dim + each.value_dim)
        for each in _places(config, layers, KVGroups.of(config), tp_size).values()
    )
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
        groups: KVGroups | None = None,
        allocate: Allocate | None = None,
    ) -> None:
        """Allocates all blocks, by default filled with zeros. `groups` are by default the groups of
        the configuration. The memory that `allocate` returns may contain the blocks of an earlier
        epoch.

        Memory must not contain NaNs: attention reads slots after the end of a sequence with weight
        zero, and zero times NaN is NaN.
        """
        self.n_blocks = n_blocks
        self.block_size = block_size
        groups = groups or KVGroups.of(config)
        if allocate is None:
            allocate = partial(_zeros, device)
        storage: dict[int, tuple[Tensor, Tensor]] = {}
        for place, sizes in _places(config, layers, groups, tp_size).items():
            shape = (n_blocks, block_size, sizes.n_heads)
            storage[place] = (
                allocate((*shape, sizes.key_dim), dtype),
                allocate((*shape, sizes.value_dim), dtype),
            )
        self.layers: tuple[tuple[Tensor, Tensor], ...] = tuple(
            storage[place] for place in _place_of_each(config, layers, groups)
        )
        """For each layer, the keys and values to which it attends: its own keys and values, or the
        keys and values of an earlier layer."""

    def key_caches(self) -> Sequence[Tensor]:
        """Returns key storage for each combination of number and size of K/V heads in this stage:
        the storage of the first layer with such heads. If no layer stores keys, returns one empty
        tensor."""
        of_kind: dict[torch.Size, Tensor] = {}
        for keys, _ in self.layers:
            if keys.numel():
                of_kind.setdefault(keys.shape, keys)
        return list(of_kind.values()) or [self.layers[0][0]]


def _zeros(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _places(
    config: ModelConfig, layers: range, groups: KVGroups, tp_size: int
) -> dict[int, KVSizes]:
    """Returns, for each place (see `_place_of_each`), the sizes of the keys and values that this
    rank stores there.

    Layers of different groups use the same place, because a block belongs to one group at a time.
    """
    places = zip(_place_of_each(config, layers, groups), layers, strict=True)
    return {
        place: config.layer_kv[i].of_rank(tp_size)
        for place, i in places
        if config.layer_kv[i].n_heads or place == _NOWHERE
    }


def _place_of_each(config: ModelConfig, layers: range, groups: KVGroups) -> list[int]:
    """Returns, for each layer, its place: the index of its storage among the layers of its K/V
    group. A layer that stores no keys and values has the place of the layer whose keys and values
    it uses. All layers of an encoder have one place."""
    if not config.is_causal:
        return [0] * len(layers)
    of_layers = groups.of_layers
    n_before: Counter[int] = Counter()
    places: dict[int, int] = {}
    for i in layers:
        if config.layer_kv[i].n_heads:
            places[i] = n_before[of_layers[i]]
            n_before[of_layers[i]] += 1
        else:
            places[i] = places.get(config.kv_sources[i], _NOWHERE)
    return list(places.values())
