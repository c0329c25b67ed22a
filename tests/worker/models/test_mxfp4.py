"""MXFP4 against `transformers`: the numbers themselves, and a checkpoint that has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from services.worker.models import CheckpointError, UnsupportedModel, random_stage
from services.worker.models.config_file import read_config
from services.worker.models.quantised.mxfp4 import blocks_of, dequantised
from tests.checkpoints import SMALL, Oracle, edit_config, write_family_checkpoint
from tests.worker.models.test_models import compare_random_schedule
from tests.worker.pipeline import Pipeline, load

N_EXPERTS, HIDDEN, SIZE, N_LAYERS = 5, 64, 96, 3
CONFIG = GptOssConfig(
    **{**SMALL, "hidden_size": HIDDEN, "intermediate_size": SIZE, "num_hidden_layers": N_LAYERS},
    head_dim=8,
    sliding_window=7,
    num_local_experts=N_EXPERTS,
    num_experts_per_tok=2,
)
QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def write_pair(directory: Path, *, plain_layers: tuple[int, ...] = ()) -> tuple[Path, Path]:
    """Returns a checkpoint with experts in MXFP4 and one with the same numbers as `transformers`
    dequantises them. Experts of `plain_layers` are not in MXFP4."""
    plain = write_family_checkpoint(directory / "plain", CONFIG)
    packed = write_family_checkpoint(directory / "packed", CONFIG)
    tensors = load_file(plain / "model.safetensors")
    stored = dict(tensors)
    generator = torch.Generator().manual_seed(7)
    for layer in set(range(N_LAYERS)) - set(plain_layers):
        for name, n_out, n_in in (("gate_up", 2 * SIZE, HIDDEN), ("down", HIDDEN, SIZE)):
            key = f"model.layers.{layer}.mlp.experts.{name}_proj"
            shape = (N_EXPERTS, n_out, n_in // 32)
            blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(121, 126, shape, generator=generator, dtype=torch.uint8)
            del stored[key]
            stored |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
            tensors[key] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, plain / "model.safetensors")
    save_file(stored, packed / "model.safetensors")
    names = [f"model.layers.{layer}.mlp.experts" for layer in plain_layers]
    patterns = [*QUANTIZATION["modules_to_not_convert"], *names]
    edit_config(packed, quantization_config={**QUANTIZATION, "modules_to_not_convert": patterns})
    return packed, plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_byte_with_every_scale_is_the_oracles_number(dtype: torch.dtype) -> None:
    byte = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 256, 16, 16)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).expand(1, 256, 16)
    expected = convert_moe_packed_tensors(byte, scales, dtype=dtype).transpose(1, 2)
    torch.testing.assert_close(
        dequantised(byte, scales).to(dtype), expected, rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize(
    ("columns", "blocks"),
    [
        (range(64), range(2)),
        (range(32, 64), range(1, 2)),
        (range(48), range(2)),
        (range(48, 96), range(1, 3)),
        (range(40, 50), range(1, 2)),
    ],
    ids=str,
)
def test_the_blocks_of_numbers_are_those_that_they_are_in(columns: range, blocks: range) -> None:
    assert blocks_of(columns) == blocks


@pytest.mark.parametrize(
    ("n_stages", "tp_size"),
    [
        (1, 1),
        pytest.param(2, 1, marks=pytest.mark.thorough),
        # Three blocks for two ranks: each has a half of the second.
        (1, 2),
        pytest.param(2, 2, marks=pytest.mark.thorough),
    ],
)
def test_a_checkpoint_is_what_the_oracle_dequantises(
    tmp_path: Path, n_stages: int, tp_size: int
) -> None:
    packed, plain = write_pair(tmp_path)
    pipeline = Pipeline(packed, n_stages=n_stages, tp_size=tp_size)
    compare_random_schedule(pipeline, Oracle(plain), seed=n_stages)


def test_the_oracle_reads_the_same_from_the_file_itself(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")  # without which transformers reads no MXFP4
    packed, _ = write_pair(tmp_path)
    compare_random_schedule(Pipeline(packed), Oracle(packed), seed=1)


def test_layers_that_are_not_converted_are_read_as_they_are(tmp_path: Path) -> None:
    packed, plain = write_pair(tmp_path, plain_layers=(1,))
    compare_random_schedule(Pipeline(packed), Oracle(plain), seed=3)


@pytest.mark.parametrize(
    "pattern", ["model.layers.1.mlp", "model.*.1.mlp.experts", "1.mlp.experts"]
)
def test_modules_are_named_by_their_beginning_their_end_or_a_pattern(
    tmp_path: Path, pattern: str
) -> None:
    names = {"modules_to_not_convert": [pattern]}
    config = config_with(tmp_path, quantization_config={**QUANTIZATION, **names})
    assert config.packed_layers == (0, 2)


def test_names_that_only_begin_like_a_pattern_are_not_meant(tmp_path: Path) -> None:
    names = {"modules_to_not_convert": ["model.layers.1.ml", "lm_head", "layers"]}
    config = config_with(tmp_path, quantization_config={**QUANTIZATION, **names})
    assert config.packed_layers == (0, 1, 2)


def config_with(directory: Path, **changes: Any) -> Any:
    CONFIG.architectures = ["GptOssForCausalLM"]
    CONFIG.save_pretrained(directory)
    return read_config(edit_config(directory, **changes))


def test_a_rank_reads_the_blocks_that_its_part_is_in(tmp_path: Path) -> None:
    packed, _ = write_pair(tmp_path)
    stored = load_file(packed / "model.safetensors")

    def n_read(tp_rank: int, tp_size: int) -> int:
        heard: list[tuple[int, int]] = []
        load(
            packed,
            tp_rank=tp_rank,
            tp_size=tp_size,
            on_progress=lambda n_done, n_total: heard.append((n_done, n_total)),
        )
        assert heard[0] == (0, heard[-1][1])
        assert heard[-1][0] == heard[-1][1]  # all that was announced, and no more
        return heard[-1][1]

    def n_bytes(*ends: str) -> int:
        return sum(tensor.nbytes for name, tensor in stored.items() if name.endswith(ends))

    assert n_read(0, 1) == sum(tensor.nbytes for tensor in stored.values())
    shared = n_bytes("norm.weight", "router.weight", "router.bias")
    of_one = n_bytes("o_proj.bias", "down_proj_bias")  # that rank 0 has
    down = n_bytes("down_proj_blocks", "down_proj_scales")
    divided = sum(tensor.nbytes for tensor in stored.values()) - shared - of_one - down
    # The middle one of three blocks is read by both; the vocabulary is odd.
    odd = (2 * SMALL["vocab_size"] % 4) * HIDDEN * 4 // 2
    assert n_read(0, 2) == shared + of_one + down * 2 // 3 + divided // 2 + odd
    assert n_read(1, 2) == shared + down * 2 // 3 + divided // 2 - odd


def test_bfloat16_is_what_a_file_means_that_does_not_say_it(tmp_path: Path) -> None:
    config = config_with(tmp_path, quantization_config=QUANTIZATION, dtype=None)
    assert config.resolve_dtype("auto") == torch.bfloat16
    config = config_with(tmp_path, quantization_config=QUANTIZATION, dtype="float32")
    assert config.resolve_dtype("auto") == torch.float32


def test_random_weights_need_no_blocks(tmp_path: Path) -> None:
    config = config_with(tmp_path, quantization_config=QUANTIZATION)
    stage = random_stage(config, dtype=torch.float32, device=torch.device("cpu"))
    assert stage.n_layers == N_LAYERS


def _spoil(tensors: dict[str, Tensor], name: str, how: str) -> None:
    if how == "missing":
        del tensors[name]
    elif how == "shape":
        tensors[name] = tensors[name][..., 1:].contiguous()
    else:
        tensors[name] = tensors[name].float()


@pytest.mark.parametrize("how", ["missing", "shape", "element type F32"])
@pytest.mark.parametrize("end", ["blocks", "scales"])
def test_tensors_that_are_not_as_promised_are_refused_by_name(
    tmp_path: Path, how: str, end: str
) -> None:
    packed, _ = write_pair(tmp_path)
    tensors = load_file(packed / "model.safetensors")
    name = f"model.layers.1.mlp.experts.down_proj_{end}"
    _spoil(tensors, name, how)
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name}.*{how}|{how}.*{name}"):
        load(packed)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"quantization_config": {"quant_method": "mxfp8"}}, "mxfp8"),
        ({"quantization_config": {**QUANTIZATION, "group_size": 64}}, "group_size"),
        ({"quantization_config": QUANTIZATION, "hidden_size": 48}, r"hidden_size \(48\)"),
        ({"quantization_config": QUANTIZATION, "intermediate_size": 80}, "intermediate_size"),
        (
            {"quantization_config": {**QUANTIZATION, "modules_to_not_convert": ["x"] * 10_001}},
            "modules_to_not_convert",
        ),
        (
            {"quantization_config": {**QUANTIZATION, "modules_to_not_convert": ["x" * 301]}},
            "modules_to_not_convert",
        ),
        ({"quantization_config": {**QUANTIZATION, "modules_to_not_convert": [1]}}, "wrong type"),
        ({"quantization_config": "mxfp4"}, "wrong type"),
        ({"compression_config": QUANTIZATION}, "'mxfp4' is not one of"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_computed_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        config_with(tmp_path, **changes)
