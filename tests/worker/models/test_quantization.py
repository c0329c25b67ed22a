"""A model with int8 weights: how close it is to itself without, and who must know of it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.weights.linear import Quantization
from services.worker.settings import PipelinePlace, WorkerSettings
from tests.checkpoints import SMALL, write_checkpoint
from tests.limits import HANG_S
from tests.worker.pipeline import Pipeline, Span, needs_int8

N_REQUESTS = 40

LOAD_WITHOUT_TRITON = """
import sys
from importlib.machinery import PathFinder
from pathlib import Path

class WithoutTriton(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name == "triton" else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [WithoutTriton if it is PathFinder else it for it in sys.meta_path]

import torch
from services.worker.models.checkpoint import load_stage

load_stage(
    Path(sys.argv[1]),
    stage_index=0,
    n_stages=1,
    tp_rank=0,
    tp_size=1,
    dtype="auto",
    device=torch.device("cuda"),
    quantization="int8",
    on_progress=print,
)
"""


def logits(pipeline: Pipeline) -> torch.Tensor:
    """After prompts of several lengths, [N_REQUESTS, vocab_size]."""
    generator = torch.Generator().manual_seed(1)
    spans = []
    for row in range(N_REQUESTS):
        n_tokens = 1 + row % 7
        pipeline.admit(row, n_tokens)
        tokens = torch.randint(SMALL["vocab_size"], (n_tokens,), generator=generator)
        spans.append(Span(row, tokens.tolist()))
    return pipeline.run(spans)[1].float()


@needs_int8
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("n_stages", "tp_size"), [(1, 1), (3, 1), (1, 2)], ids=["whole", "stages", "shares"]
)
@pytest.mark.parametrize("shape", [{}, {"attention_bias": True, "mlp_bias": True}])
def test_logits_are_close_and_most_tokens_the_same(
    tmp_path: Path, shape: dict[str, Any], n_stages: int, tp_size: int, dtype: str
) -> None:
    write_checkpoint(tmp_path, intermediate_size=64, **shape)
    plain = logits(Pipeline(tmp_path, dtype="float32"))
    quantised = logits(
        Pipeline(tmp_path, dtype=dtype, quantization="int8", n_stages=n_stages, tp_size=tp_size)
    )
    error = (quantised - plain).pow(2).mean().sqrt() / plain.std()
    assert 0 < error < 0.1
    assert (quantised.argmax(1) == plain.argmax(1)).float().mean() >= 0.8


@pytest.mark.thorough
def test_on_a_gpu_it_needs_triton_and_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    ran = subprocess.run(
        [sys.executable, "-c", LOAD_WITHOUT_TRITON, str(tmp_path)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert "UnsupportedModel: quantization int8 needs Triton on a GPU" in ran.stderr


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_rank_is_told(quantization: Quantization, device: str) -> None:
    arguments = ["--model=/models/demo", f"--quantization={quantization}", f"--device={device}"]
    settings = WorkerSettings.load("worker", arguments)
    assert settings.for_rank(0).at(PipelinePlace(0, 1)).quantization == quantization
