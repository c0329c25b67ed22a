"""How much the storage takes and what is in it at first."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from services.worker.engine.kv_cache import KVCache, kv_block_bytes
from services.worker.models.config import KVSizes
from services.worker.models.families.deepseek_v2 import DeepseekV2Config
from services.worker.models.families.llama import LlamaConfig
from services.worker.models.rotary_config import RopeConfig

CONFIG = LlamaConfig(
    vocab_size=10,
    hidden_size=24,
    intermediate_size=8,
    n_layers=5,
    n_heads=6,
    n_kv_heads=2,
    head_dim=10,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(rope_theta=10_000.0),
)


def make_cache(dtype: torch.dtype = torch.float32, **sizes: Any) -> KVCache:
    return KVCache(CONFIG, range(3), dtype=dtype, device=torch.device("cpu"), **sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_takes_as_many_bytes_as_promised(dtype: torch.dtype) -> None:
    cache = make_cache(dtype, n_blocks=7, block_size=4)
    allocated = sum(tensor.nbytes for layer in cache.layers for tensor in layer)
    promised = kv_block_bytes(CONFIG, range(3), block_size=4, dtype=dtype, tp_size=1)
    assert allocated == 7 * promised == 7 * 3 * 2 * 4 * 2 * 10 * dtype.itemsize


def test_a_shard_stores_its_share_of_the_heads() -> None:
    whole = kv_block_bytes(CONFIG, range(3), block_size=4, dtype=torch.float32, tp_size=1)
    assert whole == 2 * kv_block_bytes(
        CONFIG, range(3), block_size=4, dtype=torch.float32, tp_size=2
    )


def test_latents_are_stored_once_on_every_rank() -> None:
    config = DeepseekV2Config(
        **{name: getattr(CONFIG, name) for name in ("vocab_size", "hidden_size", "rope")},
        intermediate_size=8,
        n_layers=3,
        n_heads=6,
        n_kv_heads=1,
        head_dim=6,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        query_rank=None,
        latent_dim=20,
        still_dim=10,
        n_chosen=2,
        n_groups=1,
        n_chosen_groups=1,
        are_sparse=(True,) * 3,
    )
    for tp_size in (1, 2, 6):
        promised = kv_block_bytes(
            config, range(3), block_size=4, dtype=torch.float32, tp_size=tp_size
        )
        assert promised == 3 * 4 * (20 + 6) * 4
        cache = KVCache(
            config,
            range(3),
            n_blocks=7,
            block_size=4,
            dtype=torch.float32,
            device=torch.device("cpu"),
            tp_size=tp_size,
        )
        assert sum(tensor.nbytes for layer in cache.layers for tensor in layer) == 7 * promised


def test_layers_are_separate_and_finite_before_anything_is_stored() -> None:
    cache = make_cache(n_blocks=2, block_size=4)
    tensors = [tensor for layer in cache.layers for tensor in layer]
    assert {tensor.shape for tensor in tensors} == {(2, 4, 2, 10)}
    assert len({tensor.data_ptr() for tensor in tensors}) == 6
    assert not any(tensor.any() for tensor in tensors)


@dataclass(frozen=True, kw_only=True)
class UnequalConfig(LlamaConfig):
    """Layers of two kinds; the last attends to what the second stores."""

    @property
    def layer_kv(self) -> Sequence[KVSizes]:
        return (KVSizes(2, 10, 10), KVSizes(1, 20, 20), KVSizes(2, 10, 10), KVSizes(0, 0, 0))

    @property
    def kv_sources(self) -> Sequence[int]:
        return (0, 1, 2, 1)


def test_layers_of_several_kinds_store_what_each_needs_or_share_it() -> None:
    config = UnequalConfig(**{**vars(CONFIG), "n_layers": 4})
    layers = range(1, 4)
    cache = KVCache(
        config,
        layers,
        n_blocks=3,
        block_size=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    assert [keys.shape for keys, _ in cache.layers] == [(3, 4, 1, 20), (3, 4, 2, 10), (3, 4, 1, 20)]
    assert cache.layers[2][0] is cache.layers[0][0]
    assert cache.layers[2][1] is cache.layers[0][1]
    assert [keys is cache.layers[i][0] for i, keys in enumerate(cache.key_caches())] == [True, True]
    allocated = sum(tensor.nbytes for layer in cache.layers[:2] for tensor in layer)
    promised = kv_block_bytes(config, layers, block_size=4, dtype=torch.float32, tp_size=1)
    assert allocated == 3 * promised
