"""Programs of stages: how they run, and that every runner of them computes the same."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    GlmConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from kernels import TORCH, AttentionForm, HeadNorms, Ops, native_ops
from kernels.native.layers import NativeProgram
from kernels.ops import ProgramRunner
from kernels.packing.linear import pack, pack_gated
from kernels.program import Program
from kernels.pytorch.greedy import greedy
from kernels.pytorch.interpreter import Interpreter
from kernels.pytorch.linear import OneDnnWeight
from kernels.steps import AllGather, AllReduce, Call
from kernels.upload import uploads_for
from kernels.weights.linear import PlainWeight, Quantization
from services.worker.models import rope
from services.worker.models.decoder_layers import (
    Attention,
    Embedding,
    GatedMLP,
    Head,
    NormedHead,
    PreNormLayer,
    TokenEmbedding,
)
from services.worker.models.layers import (
    ColumnParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from services.worker.models.rope import RotaryEmbedding
from services.worker.models.rotary_config import RopeConfig, RotaryConfig
from services.worker.models.stage import StageBatch, StageModel
from services.worker.models.stage_program import StagePieces
from services.worker.models.tensor_parallel import SINGLE
from tests.checkpoints import SMALL, write_family_checkpoint
from tests.worker.models.test_registry import BASIC, KINDS, SHAPES
from tests.worker.pipeline import Pipeline, Span, load, needs_int8

N_ROWS = 5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Of each kind of layers one family, whole and divided; the others where there is time. The
# library's logits of every family are also compared with the oracle's, in `test_registry.py`.
EVERY = [  # config, dtype, ranks that share each layer
    pytest.param(
        config,
        dtype,
        tp_size,
        id=f"{name}-{dtype}-{tp_size}",
        marks=() if name in KINDS else pytest.mark.thorough,
    )
    for name, config in SHAPES.items()
    for dtype, tp_size in (("float32", 1), ("bfloat16", 2))
]

# Gates and what they gate share panels, which need a size that is a multiple of half a panel.
LLAMA_LIKE = {**SMALL, "intermediate_size": 64}
HALF_TURNS = {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5}
LLAMAS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**LLAMA_LIKE),
    "llama with biases": LlamaConfig(**LLAMA_LIKE, attention_bias=True),
    "llama with heads of 64": LlamaConfig(**LLAMA_LIKE, head_dim=64),
    "mistral": MistralConfig(**LLAMA_LIKE, sliding_window=5),
    "qwen2": Qwen2Config(
        **LLAMA_LIKE, use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**LLAMA_LIKE, head_dim=16),
    "phi3": Phi3Config(**LLAMA_LIKE, pad_token_id=None, rope_parameters=HALF_TURNS),
    "glm": GlmConfig(**LLAMA_LIKE, head_dim=16, pad_token_id=None),
    "tied": LlamaConfig(**{**LLAMA_LIKE, "tie_word_embeddings": True}),
}


def skip_without_native(dtype: str) -> None:
    if isinstance(pack(torch.zeros(64, 64, dtype=DTYPES[dtype])), OneDnnWeight | PlainWeight):
        pytest.skip(f"no native linear layers for {dtype}")


def native() -> Ops:
    ops = native_ops()
    assert ops is not None
    return ops


def program_of(stage: StageModel) -> Program:
    """The program of a stage, which the native library must run."""
    assert isinstance(stage.runner, NativeProgram)
    return stage.runner.program


def calls_of(program: Program) -> set[str]:
    """What a program calls Python for."""
    return {step.name for step in program.steps if isinstance(step, Call)}


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


def assert_equal_interpreted(directory: Path, **options: object) -> None:
    """The native library's logits are the interpreter's, to the bit."""
    at_once = run(Pipeline(directory, **options))  # type: ignore[arg-type]
    interpreted = run(Pipeline(directory, interpreted_on=native(), **options))  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(at_once, interpreted, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", LLAMAS.values(), ids=LLAMAS)
def test_the_library_computes_the_same_as_the_interpreter(
    tmp_path: Path, config: PreTrainedConfig, dtype: str
) -> None:
    skip_without_native(dtype)
    write_family_checkpoint(tmp_path, config)
    program = program_of(load(tmp_path, dtype=dtype))
    assert program.inputs is None
    assert program.logits is not None
    assert not calls_of(program)
    assert_equal_interpreted(tmp_path, dtype=dtype)


@pytest.mark.parametrize(("config", "dtype", "tp_size"), EVERY)
def test_the_library_computes_every_family_as_the_interpreter_does(
    tmp_path: Path, config: PreTrainedConfig, dtype: str, tp_size: int
) -> None:
    skip_without_native(dtype)
    write_family_checkpoint(tmp_path, config)
    assert_equal_interpreted(tmp_path, dtype=dtype, tp_size=tp_size)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(config, id=name, marks=() if name in KINDS else pytest.mark.thorough)
        for name, config in SHAPES.items()
    ],
)
def test_pytorch_alone_computes_every_family(tmp_path: Path, config: PreTrainedConfig) -> None:
    skip_without_native("float32")
    write_family_checkpoint(tmp_path, config)
    ours, theirs = run(Pipeline(tmp_path, interpreted_on=TORCH)), run(Pipeline(tmp_path))
    for torch_logits, native_logits in zip(ours, theirs, strict=True):
        torch.testing.assert_close(torch_logits, native_logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in BASIC else pytest.mark.thorough)
        for name in SHAPES
        if name != "gemma4-experts"
    ]
    + ["gemma4-experts"],  # its router calls Python
)
def test_families_run_without_python_but_for_what_few_of_them_have(
    tmp_path: Path, family: str
) -> None:
    skip_without_native("float32")
    write_family_checkpoint(tmp_path, SHAPES[family])
    program = program_of(load(tmp_path))
    assert program.inputs is None
    assert program.logits is not None
    calls: set[str] = set()
    if family.startswith("gemma3n"):
        calls = {
            "streams of embeddings",
            "predicted streams",
            "corrected streams",
            "sum of streams and inputs",
            "mean of streams",
            "sums of gates",
            "squared deviations of gates",
            "closed gates",
        }
    elif family == "gemma4-experts":
        calls = {"scaled direction", "chosen experts"}
    assert calls_of(program) == calls


def test_ranks_that_share_layers_meet_at_steps(tmp_path: Path) -> None:
    skip_without_native("float32")
    write_family_checkpoint(tmp_path, LLAMAS["llama"])
    program = program_of(load(tmp_path, tp_size=2))
    meetings = [type(step) for step in program.steps if isinstance(step, AllReduce | AllGather)]
    assert meetings == [AllReduce] * (1 + 2 * SMALL["num_hidden_layers"]) + [AllGather]
    assert program.inputs is None
    assert program.logits is not None


def test_every_stage_runs_its_own_layers(tmp_path: Path) -> None:
    skip_without_native("float32")
    write_family_checkpoint(tmp_path, LLAMAS["llama"])
    for index in range(2):
        program = program_of(load(tmp_path, stage_index=index, n_stages=2))
        assert (program.inputs is None) == (index == 0)
        assert (program.logits is None) == (index == 0)
    assert_equal_interpreted(tmp_path, n_stages=2)


# Each family with one of the ways to divide and to quantise, the other ways where there is time.
QUANTISED = {
    "gpt2": ("int8", 1),
    "gemma3": ("int4", 2),
    "cohere2": ("int8", 2),
    "granite-biases": ("int4", 1),
    "qwen2_moe": ("int4", 2),
    "deepseek_v3": ("int8", 1),
    "qwen3_5": ("int4", 2),
}


@needs_int8
@pytest.mark.parametrize(
    ("family", "quantization", "tp_size"),
    [
        pytest.param(
            family,
            quantization,
            tp_size,
            marks=() if often == (quantization, tp_size) else pytest.mark.thorough,
        )
        for family, often in QUANTISED.items()
        for quantization in ("int8", "int4")
        for tp_size in (1, 2)
    ],
)
def test_the_library_runs_programs_of_quantised_weights(
    tmp_path: Path, family: str, tp_size: int, quantization: Quantization
) -> None:
    write_family_checkpoint(tmp_path, SHAPES[family])
    program_of(load(tmp_path, quantization=quantization))
    assert_equal_interpreted(tmp_path, quantization=quantization, tp_size=tp_size)


def test_programs_with_other_matrices_are_interpreted() -> None:
    pieces = TestWhatNoFamilyHas().pieces()
    layer = pieces.layers[0]
    assert isinstance(layer, PreNormLayer)
    assert isinstance(layer.mlp, GatedMLP)
    plain = RowParallelLinear(PlainWeight(torch.zeros(48, 64)), None)
    other = replace(pieces, layers=[replace(layer, mlp=replace(layer.mlp, down=plain))])
    assert isinstance(native().runner(other.program(torch.float32)), Interpreter)


class TestWhatNoFamilyHas:
    """Scale, soft cap, sinks, the other gate, and biases everywhere, on two threads."""

    N_HEADS, N_KV_HEADS, HEAD_DIM, HIDDEN, N_TOKENS = 6, 2, 16, 48, 9

    def layers(self) -> list[PreNormLayer]:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator) / 4

        def layer() -> PreNormLayer:
            width = self.N_HEADS * self.HEAD_DIM
            n_qkv = (self.N_HEADS + 2 * self.N_KV_HEADS) * self.HEAD_DIM
            attention = Attention(
                qkv=ColumnParallelLinear(pack(random(n_qkv, self.HIDDEN)), random(n_qkv)),
                output=RowParallelLinear(pack(random(self.HIDDEN, width)), random(self.HIDDEN)),
                n_heads=self.N_HEADS,
                n_kv_heads=self.N_KV_HEADS,
                head_dim=self.HEAD_DIM,
                form=AttentionForm(window=4, scale=0.3, soft_cap=5.0),
                rotary=0,
                head_norms=HeadNorms(random(self.HEAD_DIM), random(self.HEAD_DIM), 1e-5),
                sinks=4 * random(self.N_HEADS),
            )
            mlp = GatedMLP(
                pack_gated(random(128, self.HIDDEN), "gelu_tanh"),
                RowParallelLinear(pack(random(self.HIDDEN, 64)), random(self.HIDDEN)),
            )
            before, between = (RMSNorm(random(self.HIDDEN), eps) for eps in (1e-5, 1e-3))
            return PreNormLayer(before, attention, between, mlp)

        return [layer(), layer()]

    def head(self) -> NormedHead:
        generator = torch.Generator().manual_seed(2)
        weight = torch.randn(70, self.HIDDEN, generator=generator)
        norm = RMSNorm(torch.randn(self.HIDDEN, generator=generator), 1e-2)
        return NormedHead(norm, VocabParallelHead(pack(weight), range(70), 70))

    def embedding(self) -> TokenEmbedding:
        generator = torch.Generator().manual_seed(4)
        table = PlainWeight(torch.randn(70, self.HIDDEN, generator=generator))
        return TokenEmbedding(VocabParallelEmbedding(table, range(70), 70))

    def pieces(
        self,
        *,
        embedding: Embedding | None = None,
        head: Head | None = None,
        n_positions: int = 9,
    ) -> StagePieces:
        config = RotaryConfig(
            vocab_size=70,
            hidden_size=self.HIDDEN,
            n_layers=2,
            n_heads=self.N_HEADS,
            n_kv_heads=self.N_KV_HEADS,
            head_dim=self.HEAD_DIM,
            max_position_embeddings=n_positions,
            intermediate_size=64,
            rms_norm_eps=1e-5,
            rope=RopeConfig(rope_theta=100.0),
        )
        rotary = RotaryEmbedding(config, dtype=torch.float32, device=torch.device("cpu"))
        return StagePieces(embedding, [rotary], self.layers(), head, self.HIDDEN)

    def library(self, **options: Any) -> NativeProgram:
        """What runs the program of `pieces(**options)` natively."""
        runner = native().runner(self.pieces(**options).program(torch.float32))
        assert isinstance(runner, NativeProgram)
        return runner

    def run(
        self, runner: ProgramRunner, inputs: torch.Tensor, sampled: Sequence[int] | None = None
    ) -> torch.Tensor:
        """On a copy of `inputs`, since they may be used up."""
        shape = (3, 4, self.N_KV_HEADS, self.HEAD_DIM)
        kv = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(2)]
        attention = native().plan_attention(
            np.array([0, 0]),
            np.array([5, 4]),
            block_tables=np.array([[2, 0], [1, 1]]),
            key_caches=[kv[0][0]],
            n_heads=self.N_HEADS,
            uploads=uploads_for(torch.device("cpu")),
        )
        positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3])
        slots = torch.tensor([8, 9, 10, 11, 0, 4, 5, 6, 7])
        batch = StageBatch(positions, slots, attention)
        if sampled is None:
            return runner(inputs.clone(), batch, kv)
        places = torch.tensor(sampled, dtype=torch.int64)
        logits = runner.logits(inputs.clone(), batch, kv, places)
        if logits.argmax is not None:
            assert logits.argmax.tolist() == greedy(logits.values).tolist()
        return logits.values.clone()

    def hidden(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(self.N_TOKENS, self.HIDDEN, generator=generator).to(dtype)

    @pytest.mark.parametrize("is_first", [True, False])
    def test_is_computed_as_well(self, is_first: bool) -> None:
        skip_without_native("float32")
        inputs, embedding = self.hidden(), None
        if is_first:
            inputs, embedding = torch.tensor([3, 0, 69, 3, 8, 1, 2, 30, 31]), self.embedding()
        library = self.library(embedding=embedding, head=self.head())
        interpreter = Interpreter(library.program, native())
        assert (library.program.inputs is None) == is_first
        n_threads = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            assert torch.equal(self.run(library, inputs), self.run(interpreter, inputs))
            for sampled in ([], [4, 8], [0, 1, 5], range(self.N_TOKENS), []):
                logits = self.run(library, inputs, sampled)
                assert torch.equal(logits, self.run(interpreter, inputs, sampled))
                assert logits.shape == (len(sampled), 70)
        finally:
            torch.set_num_threads(n_threads)

    def test_the_head_alone_computes_the_same_logits(self) -> None:
        skip_without_native("float32")
        library = self.library(head=self.head())
        expected = self.run(library, self.hidden(), [4, 8])
        hidden = self.run(library, self.hidden())[[4, 8]]
        for runner in (library, Interpreter(library.program, native())):
            logits = runner.head(hidden, SINGLE)
            runner.head(hidden + 1, SINGLE)  # which does not overwrite them
            assert torch.equal(logits, expected)
            assert runner.head(hidden[:0], SINGLE).shape == (0, 70)

    def test_sinks_make_a_difference(self) -> None:
        skip_without_native("float32")
        pieces = self.pieces()
        without = [
            replace(layer, attention=replace(layer.attention, sinks=None))
            for layer in pieces.layers
            if isinstance(layer, PreNormLayer) and isinstance(layer.attention, Attention)
        ]
        plain = native().runner(replace(pieces, layers=without).program(torch.float32))
        assert isinstance(plain, NativeProgram)
        with_sinks = self.run(self.library(), self.hidden())
        assert not torch.equal(with_sinks, self.run(plain, self.hidden()))

    @pytest.mark.parametrize(
        "sinks", [torch.zeros(6, dtype=torch.bfloat16), torch.zeros(5)], ids=["bfloat16", "five"]
    )
    def test_sinks_that_the_library_would_misread_are_refused(self, sinks: torch.Tensor) -> None:
        skip_without_native("float32")
        pieces = self.pieces()
        layer = pieces.layers[0]
        assert isinstance(layer, PreNormLayer)
        assert isinstance(layer.attention, Attention)
        wrong = replace(layer, attention=replace(layer.attention, sinks=sinks))
        with pytest.raises(ValueError, match="sinks"):
            native().runner(replace(pieces, layers=[wrong, wrong]).program(torch.float32))

    def test_without_a_head_there_are_no_logits(self) -> None:
        skip_without_native("float32")
        library = self.library()
        for runner in (library, Interpreter(library.program, native())):
            with pytest.raises(ValueError, match="has no head"):
                self.run(runner, self.hidden(), [8])
            with pytest.raises(ValueError, match="has no head"):
                runner.head(self.hidden(), SINGLE)

    def test_angles_may_be_replaced(self) -> None:
        skip_without_native("float32")
        library = self.library()
        before = self.run(library, self.hidden())
        (rotary,) = library.program.rotaries
        angles = rotary.angles
        assert angles is not None
        angles.cos, angles.signed_sin = angles.cos.flip(0), angles.signed_sin.flip(0)
        after = self.run(library, self.hidden())
        interpreter = Interpreter(library.program, native())
        assert torch.equal(after, self.run(interpreter, self.hidden()))
        assert not torch.equal(after, before)

    def test_other_types_are_refused(self) -> None:
        skip_without_native("float32")
        with pytest.raises(ValueError, match=r"where layers are torch\.bfloat16"):
            native().runner(self.pieces().program(torch.bfloat16))
        with pytest.raises(ValueError, match=r"where layers are torch\.float32"):
            self.run(self.library(), self.hidden(torch.bfloat16))
        tokens = torch.arange(self.N_TOKENS, dtype=torch.int32)
        with pytest.raises(ValueError, match="int64"):
            self.run(self.library(embedding=self.embedding()), tokens)

    @pytest.mark.parametrize("token", [-1, 70])
    def test_tokens_that_the_table_lacks_are_refused(self, token: int) -> None:
        skip_without_native("float32")
        inputs = torch.arange(self.N_TOKENS)
        inputs[3] = token
        with pytest.raises(IndexError, match="1 tokens or positions"):
            self.run(self.library(embedding=self.embedding()), inputs)

    def test_positions_that_angles_lack_are_refused(self) -> None:
        skip_without_native("float32")
        library = self.library(n_positions=4)
        with pytest.raises(IndexError, match="index out of range"):
            self.run(Interpreter(library.program, native()), self.hidden())
        with pytest.raises(IndexError, match="1 tokens or positions"):
            self.run(library, self.hidden())

    def test_angles_grow_with_the_positions_of_batches(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        skip_without_native("float32")
        expected = self.run(self.library(), self.hidden())
        monkeypatch.setattr(rope, "FIRST_POSITIONS", 2)
        library = self.library()
        angles = library.program.rotaries[0].angles
        assert angles is not None
        assert len(angles.cos) == 2
        assert torch.equal(self.run(library, self.hidden()), expected)
        assert len(angles.cos) == len(angles.signed_sin) == 8

    def test_storage_is_not_kept_and_another_one_is_used(self) -> None:
        skip_without_native("float32")
        library = self.library()
        expected = self.run(library, self.hidden())
        assert torch.equal(self.run(library, self.hidden()), expected)
        assert library._storage._first() is None

    @pytest.mark.parametrize("place", [-1, N_TOKENS])
    def test_places_that_are_not_in_the_batch_are_refused(self, place: int) -> None:
        skip_without_native("float32")
        with pytest.raises(IndexError, match="places not in the batch"):
            self.run(self.library(head=self.head()), self.hidden(), [1, place])

    def test_columns_of_other_lengths_are_refused(self) -> None:
        skip_without_native("float32")
        library = self.library()
        with pytest.raises(ValueError, match="8 inputs, 9 positions"):
            self.run(library, self.hidden()[:8])
        with pytest.raises(ValueError, match="hidden states"):
            self.run(library, self.hidden()[:, :40])
