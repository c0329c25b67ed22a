"""Layers at once and layer by layer: which models run how, and that it makes no difference."""

from pathlib import Path

import pytest
import torch
from transformers import (
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from kernels.native.linear import can_gate, has_int8
from services.worker.models import decoder
from services.worker.models.layer_stack import AllAtOnce, LayerByLayer
from tests.checkpoints import SMALL, write_family_checkpoint
from tests.worker.pipeline import Pipeline, Span, load

N_ROWS = 5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Gates and what they gate share panels, which need a size that is a multiple of half a panel.
LLAMA_LIKE = {**SMALL, "intermediate_size": 64}
AT_ONCE: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**LLAMA_LIKE),
    "llama with biases": LlamaConfig(**LLAMA_LIKE, attention_bias=True),
    "llama with heads of 64": LlamaConfig(**LLAMA_LIKE, head_dim=64),
    "mistral": MistralConfig(**LLAMA_LIKE, sliding_window=5),
    "qwen2": Qwen2Config(
        **LLAMA_LIKE, use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**LLAMA_LIKE, head_dim=16),
}
LAYER_BY_LAYER: dict[str, PreTrainedConfig] = {
    "no whole panels of gates": LlamaConfig(**SMALL),
    "biases of the MLP": LlamaConfig(**LLAMA_LIKE, mlp_bias=True),
    "experts": MixtralConfig(**LLAMA_LIKE, num_local_experts=4),
    "no rotary embedding": GPT2Config(vocab_size=199, n_embd=48, n_layer=2, n_head=6),
}


def skip_without_native(dtype: str) -> None:
    if not can_gate(torch.zeros(64, 64, dtype=DTYPES[dtype])):
        pytest.skip(f"no native linear layers for {dtype}")


def run(pipeline: Pipeline) -> list[torch.Tensor]:
    """Logits of prompts, of decodes beside a part of a prompt, and of decodes alone."""
    generator = torch.Generator().manual_seed(1)

    def tokens(n: int) -> list[int]:
        return torch.randint(SMALL["vocab_size"], (n,), generator=generator).tolist()

    for row in range(N_ROWS):
        pipeline.admit(row, 9)
    iterations = [
        [Span(row, tokens(3 + row)) for row in range(N_ROWS - 1)],
        [Span(N_ROWS - 1, tokens(7)), *(Span(row, tokens(1)) for row in range(N_ROWS - 1))],
        *([Span(row, tokens(1)) for row in range(N_ROWS)] for _ in range(3)),
    ]
    return [pipeline.run(spans)[1] for spans in iterations]


def assert_equal_at_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch, **options: object
) -> None:
    at_once = run(Pipeline(directory, **options))  # type: ignore[arg-type]
    monkeypatch.setattr(decoder, "stack", lambda layers, place, dtype: LayerByLayer(layers))
    by_layer = run(Pipeline(directory, **options))  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(at_once, by_layer, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", AT_ONCE.values(), ids=AT_ONCE)
def test_layers_at_once_compute_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: PreTrainedConfig, dtype: str
) -> None:
    skip_without_native(dtype)
    write_family_checkpoint(tmp_path, config)
    assert isinstance(load(tmp_path, dtype=dtype)._layer_stack, AllAtOnce)  # type: ignore[attr-defined]
    assert_equal_at_once(tmp_path, monkeypatch, dtype=dtype)


def test_every_stage_runs_its_own_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_native("float32")
    write_family_checkpoint(tmp_path, AT_ONCE["llama"])
    assert_equal_at_once(tmp_path, monkeypatch, n_stages=2)


@pytest.mark.skipif(not has_int8(), reason="no native library or no VNNI")
def test_layers_of_int8_weights_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_family_checkpoint(tmp_path, AT_ONCE["llama with biases"])
    stage = load(tmp_path, quantization="int8")
    assert isinstance(stage._layer_stack, AllAtOnce)  # type: ignore[attr-defined]
    assert_equal_at_once(tmp_path, monkeypatch, quantization="int8")


@pytest.mark.parametrize("config", LAYER_BY_LAYER.values(), ids=LAYER_BY_LAYER)
def test_other_layers_run_one_by_one(tmp_path: Path, config: PreTrainedConfig) -> None:
    write_family_checkpoint(tmp_path, config)
    assert isinstance(load(tmp_path)._layer_stack, LayerByLayer)  # type: ignore[attr-defined]


def test_ranks_that_share_layers_meet_within_each(tmp_path: Path) -> None:
    write_family_checkpoint(tmp_path, AT_ONCE["llama"])
    stage = load(tmp_path, tp_size=2)
    assert isinstance(stage._layer_stack, LayerByLayer)  # type: ignore[attr-defined]
