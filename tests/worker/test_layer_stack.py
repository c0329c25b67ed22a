"""Layers at once and layer by layer: which models run how, and that it makes no difference."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
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

from kernels import AttentionForm, HeadNorms, native_ops
from kernels.native.linear import NativeGatedWeight, can_gate, has_int8
from kernels.packed_linear import pack
from kernels.upload import uploads_for
from services.worker.models import decoder
from services.worker.models.decoder_layers import (
    Attention,
    DecoderBatch,
    GatedMLP,
    NormedHead,
    PreNormLayer,
)
from services.worker.models.gemma2 import CappedHead
from services.worker.models.layer_stack import AllAtOnce, LayerByLayer, LayerStack, stack
from services.worker.models.layers import (
    ColumnParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelHead,
)
from services.worker.models.stage import StagePlace
from services.worker.models.tensor_parallel import SINGLE
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
    "no whole panels of gates": LlamaConfig(**{**SMALL, "intermediate_size": 75}),
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
    monkeypatch.setattr(
        decoder, "stack", lambda layers, head, place, dtype: LayerByLayer(layers, head)
    )
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
    for index in range(2):
        stage = load(tmp_path, stage_index=index, n_stages=2)
        assert isinstance(stage._layer_stack, AllAtOnce)  # type: ignore[attr-defined]
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


class TestWhatNoFamilyHas:
    """Scale, soft cap, the other gate, and biases everywhere, on two threads."""

    N_HEADS, N_KV_HEADS, HEAD_DIM, HIDDEN, N_TOKENS = 6, 2, 16, 48, 9

    def layers(self) -> list[PreNormLayer]:
        generator = torch.Generator().manual_seed(0)
        ops = native_ops()
        assert ops is not None

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator) / 4

        def layer() -> PreNormLayer:
            width = self.N_HEADS * self.HEAD_DIM
            n_qkv = (self.N_HEADS + 2 * self.N_KV_HEADS) * self.HEAD_DIM
            attention = Attention(
                ColumnParallelLinear(pack(random(n_qkv, self.HIDDEN)), random(n_qkv)),
                RowParallelLinear(pack(random(self.HIDDEN, width)), random(self.HIDDEN)),
                self.N_HEADS,
                self.N_KV_HEADS,
                self.HEAD_DIM,
                ops,
                AttentionForm(window=4, scale=0.3, soft_cap=5.0),
                0,
                HeadNorms(random(self.HEAD_DIM), random(self.HEAD_DIM), 1e-5),
            )
            mlp = GatedMLP(
                NativeGatedWeight.of(random(128, self.HIDDEN), "gelu_tanh"),
                RowParallelLinear(pack(random(self.HIDDEN, 64)), random(self.HIDDEN)),
            )
            before, between = (RMSNorm(random(self.HIDDEN), eps, ops) for eps in (1e-5, 1e-3))
            return PreNormLayer(before, attention, between, mlp)

        return [layer(), layer()]

    def head(self) -> NormedHead:
        ops = native_ops()
        assert ops is not None
        generator = torch.Generator().manual_seed(2)
        weight = torch.randn(70, self.HIDDEN, generator=generator)
        norm = RMSNorm(torch.randn(self.HIDDEN, generator=generator), 1e-2, ops)
        return NormedHead(norm, VocabParallelHead(pack(weight), range(70), 70))

    def run(
        self,
        run: LayerStack,
        dtype: torch.dtype = torch.float32,
        sampled: Sequence[int] | None = None,
    ) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        n, ops = self.N_TOKENS, native_ops()
        assert ops is not None
        shape = (3, 4, self.N_KV_HEADS, self.HEAD_DIM)
        kv = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(2)]
        attention = ops.plan_attention(
            np.array([0, 0]),
            np.array([5, 4]),
            block_tables=np.array([[2, 0], [1, 1]]),
            key_cache=kv[0][0],
            n_heads=self.N_HEADS,
            uploads=uploads_for(torch.device("cpu")),
        )
        cos, sin = torch.randn(2, n, 1, self.HEAD_DIM, generator=generator).to(dtype)
        slots = torch.tensor([8, 9, 10, 11, 0, 4, 5, 6, 7])
        batch = DecoderBatch([(cos, sin)], slots, attention, SINGLE)
        hidden = torch.randn(n, self.HIDDEN, generator=generator)
        if sampled is None:
            return run(hidden, batch, kv)
        return run.logits(hidden, batch, kv, torch.tensor(sampled, dtype=torch.int64))

    def test_is_computed_as_well(self) -> None:
        skip_without_native("float32")
        ops, n_threads = native_ops(), torch.get_num_threads()
        assert ops is not None
        layers, head = self.layers(), self.head()
        at_once = stack(layers, head, StagePlace(range(2), True, True, ops), torch.float32)
        assert isinstance(at_once, AllAtOnce)
        assert at_once.layers.head is not None
        by_layer = LayerByLayer(layers, head)
        torch.set_num_threads(2)
        try:
            assert torch.equal(self.run(at_once), self.run(by_layer))
            for sampled in ([4, 8], [0, 1, 5], range(self.N_TOKENS), []):
                logits = self.run(at_once, sampled=sampled)
                assert torch.equal(logits, self.run(by_layer, sampled=sampled))
                assert logits.shape == (len(sampled), 70)
        finally:
            torch.set_num_threads(n_threads)

    def test_without_a_head_there_are_no_logits(self) -> None:
        skip_without_native("float32")
        ops = native_ops()
        assert ops is not None
        place = StagePlace(range(2), True, False, ops)
        for run in (
            stack(self.layers(), None, place, torch.float32),
            LayerByLayer(self.layers(), None),
        ):
            with pytest.raises(RuntimeError, match="only the last stage"):
                self.run(run, sampled=[8])

    def test_a_head_that_the_library_lacks_is_called(self) -> None:
        skip_without_native("float32")
        ops, head = native_ops(), self.head()
        assert ops is not None
        place = StagePlace(range(2), True, True, ops)
        capped = CappedHead(head, 2.0)
        at_once = stack(self.layers(), capped, place, torch.float32)
        assert isinstance(at_once, AllAtOnce)
        assert at_once.layers.head is None
        expected = self.run(LayerByLayer(self.layers(), capped), sampled=[4, 8])
        assert torch.equal(self.run(at_once, sampled=[4, 8]), expected)

    def test_other_types_are_refused(self) -> None:
        skip_without_native("float32")
        ops = native_ops()
        assert ops is not None
        place = StagePlace(range(2), True, True, ops)
        with pytest.raises(ValueError, match=r"where layers are torch\.bfloat16"):
            stack(self.layers(), None, place, torch.bfloat16)
        at_once = stack(self.layers(), None, place, torch.float32)
        with pytest.raises(ValueError, match=r"where layers are torch\.float32"):
            self.run(at_once, torch.bfloat16)
