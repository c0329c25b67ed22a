"""What is read of checkpoints with latent attention, in which type, and what of them is not."""

import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV2Config

from services.worker.models.checkpoint_tensors import CheckpointTensors
from services.worker.models.directory_files import DirectoryFiles
from services.worker.models.weights import WantedTensors
from tests.checkpoints import SMALL, write_family_checkpoint
from tests.worker.models.test_models import rms
from tests.worker.models.test_registry import LATENT, SHAPES, last_logits
from tests.worker.pipeline import Pipeline, Span, needs_int8

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def change(directory: Path, **tensors: Any) -> None:
    path = directory / "model.safetensors"
    save_file({**load_file(path), **tensors}, path)


def test_layers_that_predict_further_tokens_change_nothing(tmp_path: Path) -> None:
    write_family_checkpoint(tmp_path, SHAPES["deepseek_v3"])
    tokens = list(range(5, 30))
    expected = last_logits(tmp_path, tokens)
    stored = load_file(tmp_path / "model.safetensors")
    further = {
        name.replace("layers.3.", "layers.4."): tensor + 1
        for name, tensor in stored.items()
        if "layers.3." in name
    }
    assert further
    change(tmp_path, **further, **{"model.layers.4.eh_proj.weight": torch.ones(48, 96)})
    assert torch.equal(last_logits(tmp_path, tokens), expected)


def test_what_balances_experts_keeps_its_bits_in_a_model_of_bfloat16(tmp_path: Path) -> None:
    write_family_checkpoint(tmp_path, SHAPES["deepseek_v3"], dtype=torch.bfloat16)
    bias = 10 + torch.rand(9, generator=torch.Generator().manual_seed(1))
    change(tmp_path, **{BIAS: bias})
    assert not torch.equal(bias.bfloat16().float(), bias)
    wanted = WantedTensors(0, 1)
    wanted.tensor(BIAS, 9, dtype=torch.float32)
    source = CheckpointTensors(
        DirectoryFiles(tmp_path),
        wanted,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        on_progress=lambda n_done, n_total: None,
    )
    assert torch.equal(source.tensor(BIAS, 9, dtype=torch.float32), bias)
    # Rounded, they would be the same number for many experts, and others would be chosen.
    tokens = list(range(7, 40))
    ours = last_logits(tmp_path, tokens)
    change(tmp_path, **{BIAS: bias.bfloat16().float()})
    assert not torch.equal(last_logits(tmp_path, tokens), ours)


@needs_int8
def test_int8_weights_are_close_to_those_of_float32(tmp_path: Path) -> None:
    # All layers are dense: a router may choose other experts, whose results are others altogether.
    write_family_checkpoint(tmp_path, DeepseekV2Config(**{**LATENT, "first_k_dense_replace": 4}))
    tokens = random.Random(3).choices(range(SMALL["vocab_size"]), k=30)
    logits = []
    for quantization in ("none", "int8"):
        pipeline = Pipeline(tmp_path, quantization=quantization)
        pipeline.admit(0, len(tokens))
        logits.append(pipeline.run([Span(0, tokens)])[1])
    assert 0 < rms(logits[1] - logits[0]) < 0.1 * rms(logits[0])
