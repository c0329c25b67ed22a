"""How much the storage takes and what is in it at first."""

from typing import Any

import pytest
import torch

from services.worker.engine.kv_cache import KVCache, kv_block_bytes
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
