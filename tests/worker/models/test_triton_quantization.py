"""Families with the int8 weights of GPUs against themselves with weights that are rounded.

On a CUDA device these are tests of the GPU; elsewhere Triton's kernels are interpreted on the CPU,
which does not pack like this by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma2Config, GPT2Config, LlamaConfig, PreTrainedConfig

from kernels import triton_ops
from kernels.native.linear import has_int8
from kernels.weights.linear import (
    Gate,
    GatedWeight,
    LinearWeight,
    PlainWeight,
    Quantization,
    TableWeight,
)
from kernels.weights.quantise import quantised
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.plan import Admission, IterationPlan
from services.worker.models import StageModel
from services.worker.models.checkpoint import load_stage
from services.worker.models.checkpoint_tensors import CheckpointTensors
from services.worker.models.config_file import read_config
from services.worker.models.directory_files import DirectoryFiles
from services.worker.models.registry import FAMILIES
from services.worker.models.stage_place import StagePlace
from services.worker.models.weights import Part, WantedTensors
from tests.checkpoints import SMALL, write_family_checkpoint
from tests.kernels.implementations import CPU, CUDA
from tests.worker.pipeline import GREEDY

pytest.importorskip("triton")

from kernels.triton.linear_int8 import TritonInt8GatedWeight, TritonInt8Weight

DEVICE = CUDA if torch.cuda.is_available() else CPU
pytestmark = pytest.mark.gpu if torch.cuda.is_available() else pytest.mark.triton

SHAPES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SMALL),
    "llama-biases": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "gemma2": Gemma2Config(**SMALL, head_dim=8, query_pre_attn_scalar=8),
    "gpt2": GPT2Config(
        vocab_size=199, n_embd=48, n_layer=3, n_head=6, n_positions=64, initializer_range=0.25
    ),
}
PROMPTS = [[5, 80, 33, 7, 100], list(range(1, 35)), [150]]
BLOCK_SIZE = 4


class TritonTensors(CheckpointTensors):
    """A model whose matrices become what they are on a GPU, wherever they are."""

    def weight(self, parts: Sequence[Part], order: Tensor | None = None) -> LinearWeight:
        return TritonInt8Weight.of(self.joined(parts, order))

    def gated(self, parts: Sequence[Part], gate: Gate) -> GatedWeight:
        return TritonInt8GatedWeight.of(self.joined(parts), gate)

    def head(self, part: Part) -> LinearWeight:
        return PlainWeight(self.joined([part]))

    def table(self, part: Part) -> TableWeight:
        return PlainWeight(self.joined([part]))

    def rows(self, part: Part) -> TableWeight:
        return self.table(part)


def load(directory: Path, quantization: Quantization, device: torch.device) -> StageModel:
    """The whole model."""
    return load_stage(
        directory,
        stage_index=0,
        n_stages=1,
        tp_rank=0,
        tp_size=1,
        dtype="float32",
        device=device,
        quantization=quantization,
        on_progress=lambda n_done, n_total: None,
    )


def load_on_triton(directory: Path) -> StageModel:
    """The whole model, with the operations and the int8 weights of GPUs."""
    if DEVICE == CUDA:
        return load(directory, "int8", DEVICE)
    ops = triton_ops()
    assert ops is not None
    config = read_config(directory)
    family = FAMILIES[config.architecture]
    place = StagePlace.of(config, range(config.n_layers), None, ops=ops)
    wanted = WantedTensors(0, 1)
    family(config, place, source=wanted, dtype=torch.float32, device=CPU)
    source = TritonTensors(
        DirectoryFiles(directory),
        wanted,
        dtype=torch.float32,
        device=CPU,
        on_progress=lambda n_done, n_total: None,
        quantization="int8",
    )
    return family(config, place, source=source, dtype=torch.float32, device=CPU)


def round_weights(directory: Path, *, are_transposed: bool) -> None:
    """Makes every matrix of the layers what it is when it is quantised."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, weight in tensors.items():
        if weight.dim() == 2 and (".layers." in name or ".h." in name):
            whole, scales = quantised(weight.t() if are_transposed else weight)
            rounded = whole * scales[:, None]
            tensors[name] = (rounded.t() if are_transposed else rounded).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


def logits(model: StageModel) -> Tensor:
    """After the prompts and after one more token of each, [2 * n_prompts, vocab_size]."""
    runner = ModelRunner(model, n_kv_blocks=32, block_size=BLOCK_SIZE)
    rows = list(range(len(PROMPTS)))
    n_tokens = [len(tokens) for tokens in PROMPTS]
    n_blocks = [-(-(n + 1) // BLOCK_SIZE) for n in n_tokens]  # and the token after it
    prompts = IterationPlan(
        iteration=1,
        released_rows=[],
        admissions=[Admission(row, n, GREEDY) for row, n in zip(rows, n_tokens, strict=True)],
        rows=rows,
        start_positions=[0] * len(rows),
        n_tokens=n_tokens,
        sample=[True] * len(rows),
        n_new_blocks=n_blocks,
        token_on_rank=[False] * len(rows),
        token_ids=[token for tokens in PROMPTS for token in tokens],
        new_block_ids=range(sum(n_blocks)),
    )
    decodes = IterationPlan(
        iteration=2,
        released_rows=[],
        admissions=[],
        rows=rows,
        start_positions=n_tokens,
        n_tokens=[1] * len(rows),
        sample=[True] * len(rows),
        n_new_blocks=[0] * len(rows),
        token_on_rank=[False] * len(rows),
        token_ids=[9] * len(rows),
        new_block_ids=[],
    )
    results = []
    for plan in (prompts, decodes):
        values = runner.logits(runner.prepare(plan), None).values
        results.append(values.float().cpu().clone())  # which the next batch may overwrite
    return torch.cat(results)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_family_computes_what_it_would_with_rounded_weights(tmp_path: Path, shape: str) -> None:
    write_family_checkpoint(tmp_path, SHAPES[shape])
    ours = logits(load_on_triton(tmp_path))
    plain = logits(load(tmp_path, "none", CPU))
    round_weights(tmp_path, are_transposed=shape == "gpt2")
    rounded = logits(load(tmp_path, "none", CPU))
    error, cost = (ours - rounded).norm(), (rounded - plain).norm()
    assert error < 1e-4 * rounded.norm() < 1e-2 * cost
    torch.testing.assert_close(ours, rounded, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(not has_int8(), reason="no native library or no VNNI")
@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_a_gpu_is_as_close_to_the_plain_model_as_a_cpu(tmp_path: Path, shape: str) -> None:
    write_family_checkpoint(tmp_path, SHAPES[shape])
    ours = logits(load_on_triton(tmp_path))
    on_a_cpu = logits(load(tmp_path, "int8", CPU))
    plain = logits(load(tmp_path, "none", CPU))
    assert 0 < (ours - plain).norm() <= (on_a_cpu - plain).norm() < 0.1 * plain.norm()
    assert (ours - on_a_cpu).norm() < 0.1 * plain.norm()
