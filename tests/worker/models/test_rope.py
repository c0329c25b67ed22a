"""Every form of rotary angles against `transformers`' own functions, for random settings."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kernels import TORCH
from kernels.reference.operations import rotary
from services.worker.models.config import UnsupportedModel
from services.worker.models.config_file import read_config
from services.worker.models.config_json import parse_config
from services.worker.models.rope import (
    FIRST_POSITIONS,
    RotaryEmbedding,
    attention_scale,
    head_order,
    inverse_frequencies,
)
from services.worker.models.rotary_config import RopeConfig, RotaryConfig, read_rope
from tests.checkpoints import SMALL, Oracle, write_checkpoint
from tests.worker.models.test_registry import last_logits

CPU = torch.device("cpu")
LONGROPE = {"short_factor": [1.0, 2, 3, 4], "long_factor": [2.0, 3, 5, 9]}  # of heads of 8


def random_settings(rope_type: str, rng: random.Random, n_waves: int) -> dict[str, Any]:
    """Settings of a type, with what may be left out left out half of the time."""
    settings: dict[str, Any] = {"rope_type": rope_type, "rope_theta": rng.uniform(50, 1e6)}
    if rope_type == "longrope":
        for key in ("short_factor", "long_factor"):
            settings[key] = [rng.uniform(1, 40) for _ in range(n_waves)]
    optional: dict[str, Any] = {}
    if rope_type == "yarn":
        optional = {
            "attention_factor": rng.uniform(0.5, 2),
            "beta_fast": rng.uniform(8, 50),
            "beta_slow": rng.uniform(0.5, 4),
            "truncate": rng.random() < 0.5,
        }
        if rng.random() < 0.7:
            settings |= {"mscale": rng.uniform(0, 2), "mscale_all_dim": rng.choice([0, 0.7, 1.1])}
    if rope_type == "longrope":
        optional = {"attention_factor": rng.uniform(0.5, 2), "factor": rng.uniform(0.5, 40)}
    elif rope_type != "default":
        settings["factor"] = rng.uniform(1, 40)
    if rope_type == "llama3":
        low = rng.uniform(0.5, 2)
        settings |= {"low_freq_factor": low, "high_freq_factor": low + rng.uniform(0.5, 4)}
    if rope_type in ("yarn", "longrope", "llama3"):
        settings["original_max_position_embeddings"] = rng.randint(16, 5000)
    return settings | {key: value for key, value in optional.items() if rng.random() < 0.5}


@pytest.mark.parametrize("rope_type", sorted(ROPE_INIT_FUNCTIONS))
@pytest.mark.parametrize("seed", range(12))
def test_angles_are_the_oracles_for_random_settings(rope_type: str, seed: int) -> None:
    rng = random.Random(seed)
    head_dim, longest = 2 * rng.randint(3, 70), rng.randint(17, 5001)
    partial = rng.choice([1.0, 1.0, 0.5, 0.75])
    n_turned = int(head_dim * partial)
    if n_turned % 2:
        partial, n_turned = 1.0, head_dim
    if rope_type == "proportional":
        n_turned = head_dim
    settings = random_settings(rope_type, rng, n_turned // 2)
    theirs = LlamaConfig(
        head_dim=head_dim,
        max_position_embeddings=longest,
        rope_parameters={**settings, "partial_rotary_factor": partial},
    )
    file = {"max_position_embeddings": longest, "rope_parameters": settings}
    ours = RopeConfig(**read_rope({**file, "partial_rotary_factor": partial}, 1.0, 1.0))
    ours.check()
    # Of a sequence as long as they may be, which "longrope" asks for.
    frequencies, scale = ROPE_INIT_FUNCTIONS[rope_type](theirs, CPU, seq_len=longest)
    found = inverse_frequencies(ours, n_turned, longest)
    torch.testing.assert_close(found, frequencies, rtol=1e-6, atol=0)
    assert attention_scale(ours) == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize("n_turned", [2, 6, 10])
@pytest.mark.parametrize("neighbours", [False, True], ids=["halves", "neighbours"])
def test_heads_in_order_turn_as_their_stored_pairs(n_turned: int, neighbours: bool) -> None:
    class Config(RotaryConfig):
        turns_neighbours = neighbours

    config = Config(
        vocab_size=9,
        hidden_size=10,
        n_layers=1,
        n_heads=1,
        n_kv_heads=1,
        head_dim=10,
        max_position_embeddings=7,
        intermediate_size=1,
        rms_norm_eps=1e-5,
        rope=RopeConfig(rope_theta=20.0, partial_rotary_factor=n_turned / 10),
    )
    config.check()
    stored = torch.randn(7, 2, 10, generator=torch.Generator().manual_seed(0))
    expected = stored.clone()
    for pair in range(n_turned // 2):
        places = (2 * pair, 2 * pair + 1) if neighbours else (pair, pair + n_turned // 2)
        for position in range(7):
            angle = position * 20.0 ** (-2 * pair / n_turned)
            x, y = stored[position, :, places[0]], stored[position, :, places[1]]
            expected[position, :, places[0]] = x * math.cos(angle) - y * math.sin(angle)
            expected[position, :, places[1]] = y * math.cos(angle) + x * math.sin(angle)
    order = torch.tensor(head_order(config) or range(10))
    assert sorted(order.tolist()) == list(range(10))
    cos, sin = RotaryEmbedding(config, dtype=torch.float32, device=CPU)(torch.arange(7))
    for turn in (rotary, TORCH.rotary):
        found = turn(stored[..., order], cos, sin)
        torch.testing.assert_close(found, expected[..., order], rtol=1e-5, atol=1e-5)


def long_config(n_positions: int) -> RotaryConfig:
    """Heads of 12, of which 8 elements turn."""
    return RotaryConfig(
        vocab_size=9,
        hidden_size=12,
        n_layers=1,
        n_heads=1,
        n_kv_heads=1,
        head_dim=12,
        max_position_embeddings=n_positions,
        intermediate_size=1,
        rms_norm_eps=1e-5,
        rope=RopeConfig(
            rope_type="yarn",
            rope_theta=20.0,
            partial_rotary_factor=8 / 12,
            factor=8.0,
            original_max_position_embeddings=64,
        ),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_angles_are_equal_to_the_bit_however_tables_have_grown(dtype: torch.dtype) -> None:
    n = 3 * FIRST_POSITIONS + 5
    config = long_config(n)
    config.check()
    rotary = RotaryEmbedding(config, dtype=dtype, device=CPU)
    assert rotary.angles is not None
    # The slow version: all positions at once, and each angle by itself.
    frequencies = inverse_frequencies(config.rope, 8, n)
    angles = torch.arange(n, dtype=torch.float32)[:, None, None] * frequencies
    scale = attention_scale(config.rope)
    still = torch.ones(n, 1, 2)
    half_cos = torch.cat(((angles.cos() * scale), still), -1).to(dtype)
    half_sin = torch.cat(((angles.sin() * scale), 0 * still), -1).to(dtype)
    cos, sin = torch.cat((half_cos, half_cos), -1), torch.cat((-half_sin, half_sin), -1)
    lengths = []
    for longest in (5, FIRST_POSITIONS - 1, FIRST_POSITIONS, 7, n - 1):
        positions = torch.tensor([3, longest, 0])
        found = rotary(positions)
        assert torch.equal(found[0], cos[positions])
        assert torch.equal(found[1], sin[positions])
        lengths.append(len(rotary.angles.cos))
    assert lengths == [FIRST_POSITIONS] * 2 + [2 * FIRST_POSITIONS] * 2 + [n]
    with pytest.raises(IndexError):
        rotary(torch.tensor([n]))


def test_angles_take_no_memory_for_positions_that_no_sequence_has() -> None:
    config = long_config(2**31 - 1)
    config.check()
    rotary = RotaryEmbedding(config, dtype=torch.float32, device=CPU)
    rotary(torch.tensor([5]))
    assert rotary.angles is not None
    assert len(rotary.angles.cos) == FIRST_POSITIONS


def test_other_devices_compute_the_angles_of_each_batch() -> None:
    rotary = RotaryEmbedding(long_config(100), dtype=torch.float32, device=torch.device("meta"))
    assert rotary.angles is None
    cos, sin = rotary(torch.arange(7, device="meta"))
    assert cos.shape == sin.shape == (7, 1, 12)


class TestWhatDependsOnTheLength:
    """Where the oracle looks at the length of a sequence, one set of angles serves all of them."""

    def logits(
        self, directory: Path, n_tokens: int, *, max_model_len: int | None = None, **shape: Any
    ) -> tuple[Any, Any]:
        write_checkpoint(directory, **shape)
        tokens = random.Random(2).choices(range(SMALL["vocab_size"]), k=n_tokens)
        ours = last_logits(directory, tokens, max_model_len=max_model_len)[0]
        return ours, Oracle(directory).logits(tokens)[-1]

    def longrope(self, original: int) -> dict[str, Any]:
        rope = {"rope_type": "longrope", "rope_theta": 50.0, **LONGROPE}
        return {"rope_parameters": {**rope, "original_max_position_embeddings": original}}

    def test_longrope_is_the_oracles_beyond_the_original_context(self, tmp_path: Path) -> None:
        ours, theirs = self.logits(tmp_path, 30, max_model_len=256, **self.longrope(20))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)

    @pytest.mark.parametrize("max_model_len", [None, 20, 12])
    def test_longrope_is_the_oracles_in_the_original_context(
        self, tmp_path: Path, max_model_len: int | None
    ) -> None:
        ours, theirs = self.logits(tmp_path, 12, max_model_len=max_model_len, **self.longrope(20))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)

    def test_longrope_is_the_oracles_in_a_model_that_ends_with_it(self, tmp_path: Path) -> None:
        shape = self.longrope(64) | {"max_position_embeddings": 64}
        ours, theirs = self.logits(tmp_path, 64, **shape)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)

    def test_a_short_sequence_is_the_beginning_of_a_long_one(self, tmp_path: Path) -> None:
        ours, theirs = self.logits(tmp_path, 20, max_model_len=21, **self.longrope(20))
        assert (ours - theirs).abs().max() > 1e-2  # which has the short factors here
        tokens = random.Random(2).choices(range(SMALL["vocab_size"]), k=20)
        longer = Oracle(tmp_path).logits([*tokens, 5])[19]
        torch.testing.assert_close(ours, longer, rtol=0, atol=1e-4)

    def test_dynamic_is_the_oracles_up_to_the_longest_sequence(self, tmp_path: Path) -> None:
        rope = {"rope_type": "dynamic", "rope_theta": 50.0, "factor": 4.0}
        shape: dict[str, Any] = {"rope_parameters": rope, "max_position_embeddings": 32}
        ours, theirs = self.logits(tmp_path, 32, **shape)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
        assert read_config(tmp_path).max_position_embeddings == 32  # beyond it nothing is served


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rope_type": "yarn"}, "factor is missing"),
        ({"rope_type": "yarn", "factor": 2.0, "rope_theta": 0.5}, "rope_theta"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_slow": 5e-324}, "beta_slow"),
        ({"rope_type": "yarn", "factor": 2.0, "mscale": float("nan")}, "mscale"),
        ({"rope_type": "yarn", "factor": 2.0, "attention_factor": -1.0}, "attention_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 4}, "long_factor is missing"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 4}, "1 factors"),
        (
            {
                "rope_type": "longrope",
                **LONGROPE,
                "original_max_position_embeddings": 1,
            },
            "original_max_position_embeddings",
        ),
        ({"rope_type": "dynamic"}, "factor is missing"),
        ({"rope_type": "axial"}, "axial"),
        ({"rope_type": "proportional", "partial_rotary_factor": 1.1}, "partial_rotary_factor"),
        ("yarn", "wrong type"),
    ],
)
def test_settings_that_make_no_angles_are_refused_by_name(settings: Any, named: str) -> None:
    config = {key: value for key, value in SMALL.items() if key != "initializer_range"}
    config |= {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5}
    with pytest.raises(UnsupportedModel, match=named):
        parse_config({**config, "rope_scaling": settings}, {})
