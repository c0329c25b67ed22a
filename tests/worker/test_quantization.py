"""A model with int8 weights: how close it is to itself without, and who must know of it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.native.linear import has_int8
from kernels.packed_linear import Quantization
from services.worker.models import UnsupportedModel
from services.worker.models.checkpoint import load_stage
from services.worker.rank import fingerprint
from services.worker.settings import WorkerSettings
from tests.checkpoints import SMALL, write_checkpoint
from tests.worker.pipeline import Pipeline, Span, load

needs_int8 = pytest.mark.skipif(not has_int8(), reason="no native library or no VNNI")

N_REQUESTS = 40


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


def test_where_it_cannot_be_computed_it_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match="quantization int8 needs"):
        load_stage(
            tmp_path,
            stage_index=0,
            n_stages=1,
            tp_rank=0,
            tp_size=1,
            dtype="auto",
            device=torch.device("cuda"),
            quantization="int8",
            on_progress=lambda n_done, n_total: None,
        )


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_rank_is_told(quantization: Quantization) -> None:
    arguments = ["--model=/models/demo", f"--quantization={quantization}"]
    settings = WorkerSettings.load("worker", arguments)
    assert settings.for_rank(0).quantization == quantization


def test_other_devices_have_none() -> None:
    with pytest.raises(SystemExit, match="quantization int8 is computed on CPUs"):
        WorkerSettings.load("worker", ["--model=m", "--quantization=int8", "--device=cuda"])


def test_stages_of_different_quantizations_do_not_mix(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    model = load(tmp_path)
    settings = WorkerSettings(model=tmp_path).for_rank(0)
    quantised = settings.model_copy(update={"quantization": "int8"})
    assert fingerprint(settings, model) == fingerprint(settings, model)
    assert fingerprint(settings, model) != fingerprint(quantised, model)
