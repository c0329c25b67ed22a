"""Models in GGUF files, which the package `gguf` writes: `transformers` is the oracle."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from transformers import (
    AutoModelForCausalLM,
)

from kernels.native.groups import NativeGroupsWeight, has_groups
from services.worker.models import CheckpointError, UnsupportedModel, checkpoint_digest
from services.worker.models.checkpoint_tensors import CheckpointTensors
from services.worker.models.config_file import read_config
from services.worker.models.gguf_config import read_gguf_header
from services.worker.models.gguf_file import GgufFile
from services.worker.models.rotary_config import RotaryConfig
from services.worker.models.weights import Part, Shard, WantedTensors
from tests.checkpoints import edit_config, write_checkpoint
from tests.fuzz.damaged.gguf_layout import GgufLayout
from tests.ggufs import random_blocks, write_gguf
from tests.worker.pipeline import Pipeline, Span, load

TOKENS = [5, 9, 100, 3, 42, 198, 7, 60, 61, 62, 63, 2, 14, 15, 16, 90]


def last_logits(model: Path, n_stages: int = 1, tp_size: int = 1) -> torch.Tensor:
    pipeline = Pipeline(model, n_stages=n_stages, tp_size=tp_size, dtype="float32")
    pipeline.admit(0, len(TOKENS))
    return pipeline.run([Span(0, TOKENS)])[1]


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_a_quantised_file_means_what_transformers_reads_in_it(tmp_path: Path, kind: str) -> None:
    write_checkpoint(tmp_path, hidden_size=192, intermediate_size=128)
    file = write_gguf(tmp_path, tmp_path / "model.gguf", kind=GGMLQuantizationType[kind])
    oracle: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32
    )
    with torch.inference_mode():
        expected = oracle(torch.tensor([TOKENS])).logits[0, -1:]
    found = last_logits(file, n_stages=2, tp_size=2)
    # Packed weights are summed in another order.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=3e-4)


def test_linear_stretching_is_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    stretched = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    file = write_gguf(tmp_path, tmp_path / "model.gguf", metadata=stretched)
    config = read_config(file)
    assert isinstance(config, RotaryConfig)
    assert (config.rope.rope_type, config.rope.factor) == ("linear", 4.0)


def write_blocks(path: Path, blocks: np.ndarray[Any, Any], kind: GGMLQuantizationType) -> None:
    """Writes a file of two matrices, the first of which has heads."""
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.attn_q.weight", blocks, raw_dtype=kind)
    writer.add_tensor("blk.0.ffn_up.weight", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


KINDS = (
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_1", "IQ1_M", "IQ1_S", "IQ2_S", "IQ2_XS",
    "IQ2_XXS", "IQ3_S", "IQ3_XXS", "IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4", "TQ1_0", "TQ2_0",
)  # fmt: skip

PACKED = (*KINDS, "Q4_0", "Q8_0", "Q5_0", "Q5_1")


@pytest.mark.parametrize("kind", KINDS)
def test_any_part_of_a_matrix_is_that_part_of_the_whole(tmp_path: Path, kind: str) -> None:
    number = GGMLQuantizationType[kind]
    n_block, n_bytes = GGML_QUANT_SIZES[number]
    blocks = random_blocks(12, 512 // n_block * n_bytes)
    write_blocks(tmp_path / "a.gguf", blocks, number)
    config = read_config(write_checkpoint(tmp_path, num_attention_heads=3, num_key_value_heads=3))
    file = GgufFile(read_gguf_header(tmp_path / "a.gguf"), config)
    whole = torch.from_numpy(dequantize(blocks, number))
    name = file.find("model.layers.0.mlp.up_proj.weight")
    assert name is not None
    found = file.read(name, (range(5, 9), range(3, 300)))
    assert found.equal(whole[5:9, 3:300])
    # Three heads of four rows, of which neighbours in the file are halves in the model.
    order = [0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11]
    name = file.find("model.layers.0.self_attn.q_proj.weight")
    assert name is not None
    found = file.read(name, (range(3, 10), range(512)))
    assert found.equal(whole[order][3:10])


@pytest.mark.skipif(not has_groups(), reason="the native library is not built")
@pytest.mark.parametrize("kind", PACKED)
def test_numbers_in_blocks_mean_what_dequantised_ones_do(tmp_path: Path, kind: str) -> None:
    number = GGMLQuantizationType[kind]
    n_block, n_bytes = GGML_QUANT_SIZES[number]
    blocks = random_blocks(12, 512 // n_block * n_bytes)
    name = "model.layers.0.self_attn.q_proj.weight"
    write_blocks(tmp_path / "a.gguf", blocks, number)
    config = read_config(write_checkpoint(tmp_path, num_attention_heads=3, num_key_value_heads=3))
    files = GgufFile(read_gguf_header(tmp_path / "a.gguf"), config)
    for part in (
        Part(name, (12, 512)),
        Part(name, (12, 512), Shard(0, range(3, 10))),
        Part(name, (12, 512), Shard(1, range(256, 512))),
        Part(name, (12, 512), Shard(1, range(8, 300))),
    ):
        wanted = WantedTensors(0, 1)
        wanted.joined([part])
        found, plain = (
            CheckpointTensors(
                files,
                wanted,
                dtype=torch.float32,
                device=torch.device("cpu"),
                on_progress=lambda n_done, n_total: None,
            )
            for _ in range(2)
        )
        table, expected = found.rows(part), plain.joined([part])
        assert isinstance(table, NativeGroupsWeight)
        size = expected.abs().amax()
        rows = table.rows(torch.arange(len(expected)))
        torch.testing.assert_close(rows / size, expected / size, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("file_type", "dtype"), [(0, torch.float32), (1, torch.float32), (2, torch.bfloat16)]
)
def test_the_element_type_is_that_of_the_file_unless_it_is_quantised(
    tmp_path: Path, file_type: int, dtype: torch.dtype
) -> None:
    metadata = {"general.file_type": file_type}
    file = write_gguf(write_checkpoint(tmp_path), tmp_path / "model.gguf", metadata=metadata)
    assert read_config(file).resolve_dtype("auto") == dtype


def test_tokens_at_the_end_are_those_that_are_named_and_ends_of_turns(tmp_path: Path) -> None:
    tokens = [f"t{i}" for i in range(199)]
    tokens[7] = "<|eot_id|>"
    tokens[8] = "<|im_end|>"
    types = [1] * 199
    types[7] = 3
    vocabulary = {"tokens": tokens, "token_type": types, "eos_token_id": 2, "eot_token_id": 7}
    file = write_gguf(write_checkpoint(tmp_path), tmp_path / "model.gguf", tokenizer=vocabulary)
    assert read_config(file).eos_token_ids == (2, 7)


HARMONY = ("<|return|>", "<|end|>", "<|call|>", "<|endoftext|>")


@pytest.mark.parametrize(
    ("texts", "ends"),
    [
        (HARMONY, (2, 10, 12, 13)),  # an end is that of a message, and not that of the turn
        (("<|end|>", "<|end_of_text|>"), (2, 10, 11)),
    ],
    ids=["harmony", "phi"],
)
def test_ends_of_turns_are_those_of_the_format(
    tmp_path: Path, texts: tuple[str, ...], ends: tuple[int, ...]
) -> None:
    tokens, types = [f"t{i}" for i in range(199)], [1] * 199
    tokens[10 : 10 + len(texts)] = texts
    types[10 : 10 + len(texts)] = [3] * len(texts)
    vocabulary = {"tokens": tokens, "token_type": types, "eos_token_id": 2}
    file = write_gguf(write_checkpoint(tmp_path), tmp_path / "model.gguf", tokenizer=vocabulary)
    assert read_config(file).eos_token_ids == ends


def test_files_are_told_apart_by_their_digests(tmp_path: Path) -> None:
    first = write_gguf(write_checkpoint(tmp_path / "a"), tmp_path / "a.gguf")
    again = write_gguf(write_checkpoint(tmp_path / "b"), tmp_path / "a" / "a.gguf")
    other = write_gguf(write_checkpoint(tmp_path / "c", seed=1), tmp_path / "b" / "a.gguf")
    assert checkpoint_digest(first) == checkpoint_digest(again) != checkpoint_digest(other)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"general.architecture": "mamba"}, "general.architecture 'mamba' is not one of"),
        ({"llama.ssm.state_size": 8}, r"\['llama\.ssm\.state_size'\] are not supported"),
        ({"llama.rope.scaling.type": "yarn"}, r"rope\.scaling\.factor is missing"),
        ({"llama.rope.scaling.type": "dynamic"}, r"rope\.scaling\.type 'dynamic'"),
        ({"llama.attention.causal": False}, r"attention\.causal is false"),
        ({"llama.rope.dimension_count": 4}, r"rope\.dimension_count are \[4, 8\]"),
        ({"llama.attention.head_count_kv": [2, 1, 2]}, "head_count_kv is"),
        ({"llama.attention.head_count_kv": 5}, "num_key_value_heads"),
        ({"llama.context_length": 0}, "max_position_embeddings"),
        ({"split.count": 3}, "split.count"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    tmp_path: Path, metadata: dict[str, Any], named: str
) -> None:
    file = write_gguf(write_checkpoint(tmp_path), tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises(UnsupportedModel, match=named):
        load(file)


def test_a_type_that_is_not_read_is_refused_by_name(tmp_path: Path) -> None:
    kind = GGMLQuantizationType.Q8_K
    write_blocks(tmp_path / "a.gguf", random_blocks(12, GGML_QUANT_SIZES[kind][1]), kind)
    config = read_config(write_checkpoint(tmp_path))
    wanted = WantedTensors(0, 1)
    wanted.tensor("model.layers.0.mlp.up_proj.weight", 12, 256)
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up\.weight has element type Q8_K"):
        CheckpointTensors(
            GgufFile(read_gguf_header(tmp_path / "a.gguf"), config),
            wanted,
            dtype=torch.float32,
            device=torch.device("cpu"),
            on_progress=lambda n_done, n_total: None,
        )


def test_a_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    file = write_gguf(write_checkpoint(tmp_path), tmp_path / "model.gguf")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="ends inside token_embd"):
        load(file)


@pytest.mark.parametrize("way", ["swapped", "shared", "moved"])
def test_a_tensor_that_is_not_behind_the_one_before_is_refused(tmp_path: Path, way: str) -> None:
    file = write_gguf(write_checkpoint(tmp_path), tmp_path / "model.gguf")
    layout = GgufLayout.of(file.read_bytes())
    up, gate = (
        next(place for place in layout.places if place.name == f"blk.1.ffn_{name}.weight")
        for name in ("up", "gate")
    )
    if way == "swapped":
        up.offset, gate.offset = gate.offset, up.offset
    else:
        up.offset = gate.offset if way == "shared" else up.offset + 32
    file.write_bytes(layout.to_bytes())
    with pytest.raises(
        UnsupportedModel, match=r"model\.gguf: blk\.1\.ffn_.* not behind the tensor"
    ):
        load(file)


@pytest.mark.parametrize("twice", ["key", "tensor"])
def test_a_name_that_is_there_twice_is_refused(tmp_path: Path, twice: str) -> None:
    file = write_gguf(write_checkpoint(tmp_path), tmp_path / "model.gguf")
    layout = GgufLayout.of(file.read_bytes())
    if twice == "key":
        layout.values.append(layout.values[-1])
    else:
        layout.places.append(layout.places[-1])
    file.write_bytes(layout.to_bytes())
    with pytest.raises(UnsupportedModel, match=r"model\.gguf has .* (twice|of one name)"):
        load(file)


@pytest.mark.parametrize(
    ("tokenizer", "named"),
    [
        ({"eos_token_id": 1.5}, r"eos_token_id 1\.5 is no number of a token"),
        ({"eot_token_id": "2"}, "eot_token_id '2' is no number of a token"),
    ],
    ids=str,
)
def test_an_end_that_is_no_token_is_refused(
    tmp_path: Path, tokenizer: dict[str, Any], named: str
) -> None:
    file = write_gguf(write_checkpoint(tmp_path), tmp_path / "model.gguf", tokenizer=tokenizer)
    with pytest.raises(UnsupportedModel, match=rf"model\.gguf: tokenizer\.ggml\.{named}"):
        read_config(file)


@pytest.mark.parametrize("tokens", [7, True, "abc"])
def test_tokens_that_are_no_list_end_nothing(tmp_path: Path, tokens: object) -> None:
    said = {"tokens": tokens, "token_type": [3], "eos_token_id": 2}
    file = write_gguf(write_checkpoint(tmp_path), tmp_path / "model.gguf", tokenizer=said)
    assert read_config(file).eos_token_ids == (2,)


def test_tensors_that_are_missing_are_named(tmp_path: Path) -> None:
    file = write_gguf(write_checkpoint(tmp_path), tmp_path / "model.gguf")
    content = file.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.9.ffn_up.weight")
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        load(file)


def test_a_checkpoint_that_says_frequency_factors_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "frequency_factors": [1.0] * 4}
    directory = edit_config(write_checkpoint(tmp_path), rope_parameters=rope)
    assert (
        "frequency_factors"
        in json.loads((directory / "config.json").read_text())["rope_parameters"]
    )
    with pytest.raises(UnsupportedModel, match="frequency_factors"):
        read_config(directory)
