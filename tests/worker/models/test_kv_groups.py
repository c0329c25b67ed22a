"""How layers are put into K/V groups: blocks of all groups are about as large, on every stage."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine.kv_cache import KVCache, kv_block_bytes
from services.worker.models.config import KVSizes, ModelConfig
from services.worker.models.kv_groups import KVGroups
from services.worker.models.stage_place import layer_range


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """A model with windows as they are given."""

    windows: tuple[int | None, ...]
    sizes: tuple[KVSizes, ...] | None = None

    @property
    def layer_windows(self) -> Sequence[int | None]:
        return self.windows

    @property
    def layer_kv(self) -> Sequence[KVSizes]:
        return super().layer_kv if self.sizes is None else self.sizes


def config_of(*windows: int | None, sizes: tuple[KVSizes, ...] | None = None) -> Config:
    return Config(
        vocab_size=9,
        hidden_size=8,
        n_layers=len(windows),
        n_heads=2,
        n_kv_heads=2,
        head_dim=4,
        max_position_embeddings=100,
        windows=windows,
        sizes=sizes,
    )


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ((None,) * 3, ((None,), (0, 0, 0))),
        ((9,) * 3, ((9,), (0, 0, 0))),
        ((100, 101, 100), ((None,), (0, 0, 0))),
        ((9, None) * 2, ((None, 9), (1, 0, 1, 0))),
        ((9, 100) * 2, ((None, 9), (1, 0, 1, 0))),
        ((9, 9, None) * 2, ((None, 9, 9), (1, 2, 0, 1, 2, 0))),
        ((None, None, None, 9), ((None, None, None, 9), (0, 1, 2, 3))),
        ((9, 5, None), ((None, 5, 9), (2, 1, 0))),
        ((9,) * 11 + (None,), ((None, *(9,) * 6), (*(1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5), 0))),
    ],
    ids=str,
)
def test_layers_are_in_groups_of_the_smallest_kind(
    windows: tuple[int | None, ...],
    expected: tuple[tuple[int | None, ...], tuple[int, ...]],
) -> None:
    groups = KVGroups.of(config_of(*windows))
    assert (groups.windows, groups.of_layers) == expected


def test_layers_that_store_other_sizes_stay_in_one_group_that_keeps_everything() -> None:
    sizes = (KVSizes(2, 4, 4), KVSizes(1, 8, 4))
    assert KVGroups.of(config_of(9, None, sizes=sizes)) == KVGroups((None,), (0, 0))
    assert KVGroups.of(config_of(9, 9, sizes=sizes)) == KVGroups((9,), (0, 0))


def test_layers_that_store_nothing_count_in_no_group() -> None:
    sizes = (KVSizes(0, 4, 4), KVSizes(2, 4, 4), KVSizes(0, 4, 4), KVSizes(2, 4, 4))
    config = config_of(None, 9, None, 9, sizes=sizes)
    assert KVGroups.of(config).windows == (9,)
    mixed = config_of(None, 9, None, None, sizes=sizes)
    assert KVGroups.of(mixed).windows == (None, 9)
    no_layer_sees_all = config_of(None, 9, None, 5, sizes=sizes)
    assert KVGroups.of(no_layer_sees_all) == KVGroups((5, 9), (0, 1, 0, 0))
    cache = KVCache(
        mixed, range(4), n_blocks=3, block_size=2, dtype=torch.float32, device=torch.device("cpu")
    )
    assert [keys.numel() for keys, _ in cache.layers] == [0, 48, 0, 48]
    assert cache.layers[1] is cache.layers[3]


@given(
    kinds=st.lists(st.sampled_from([None, None, 9, 5, 200]), min_size=1, max_size=40),
    n_stages=st.integers(1, 4),
)
def test_blocks_of_all_groups_have_room_for_their_layers_on_every_stage(
    kinds: list[int | None], n_stages: int
) -> None:
    config = config_of(*kinds)
    groups = KVGroups.of(config)
    assert sorted(groups.windows, key=lambda window: window or 0) == list(groups.windows)
    for window, kept in zip(kinds, (groups.windows[g] for g in groups.of_layers), strict=True):
        assert kept == (window if window in (5, 9) else None)
    # Groups have about as many layers of their kind, on all stages together and on each.
    for stage in range(min(n_stages, len(kinds))):
        layers = layer_range(len(kinds), stage, min(n_stages, len(kinds)))
        n_layers = Counter(groups.of_layers[i] for i in layers)
        for window in set(groups.windows):
            counts = [n_layers[g] for g, of in enumerate(groups.windows) if of == window]
            assert max(counts) - min(counts) <= 1
        cache = KVCache(
            config,
            layers,
            n_blocks=1,
            block_size=2,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        # Within a group, no two layers share storage; and there is no more than the largest needs.
        for group in set(groups.of_layers):
            mine = [
                id(cache.layers[i - layers.start][0])
                for i in layers
                if groups.of_layers[i] == group
            ]
            assert len(mine) == len(set(mine))
        storage = {id(keys): keys.numel() + values.numel() for keys, values in cache.layers}
        assert len(storage) == max(n_layers.values())
        assert sum(storage.values()) * 4 == kv_block_bytes(
            config, layers, block_size=2, dtype=torch.float32, tp_size=1
        )
