"""Sizes of the GPU benchmark: shapes of models, and batches that are measured with the models."""

from collections.abc import Mapping
from dataclasses import dataclass

from services.worker.models.families.llama import LlamaConfig
from services.worker.models.rotary_config import RopeConfig

BLOCK_SIZE = 16
"""Number of K/V slots in a block: the default of a worker."""

RMS_NORM_EPS = 1e-5
ROPE_THETA = 500_000.0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a Llama model."""

    hidden: int
    inner: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    max_tokens: int
    """Number of tokens of the longest sequence."""

    @property
    def n_layer_weights(self) -> int:
        """Number of elements of the matrices of all layers."""
        n_attention = (2 * self.n_heads + 2 * self.n_kv_heads) * self.head_dim * self.hidden
        return self.n_layers * (n_attention + 3 * self.hidden * self.inner)

    @property
    def n_head_weights(self) -> int:
        """Number of elements of the matrix that computes logits."""
        return self.vocab_size * self.hidden

    @property
    def n_kv_elements(self) -> int:
        """Number of elements of one token's keys and values, over all layers."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim

    def iteration_bytes(
        self, n_keys: int, itemsize: int, *, layer_itemsize: int | None = None
    ) -> int:
        """Returns the bytes that an iteration must read: all matrices once, and the keys and values
        of `n_keys` tokens, summed over the requests.

        `itemsize` is the bytes per element. `layer_itemsize` is the bytes per element of the
        layers' matrices, if it differs. The bytes that an iteration writes are few in comparison
        and not counted.
        """
        n_elements = self.n_head_weights + n_keys * self.n_kv_elements
        return n_elements * itemsize + self.n_layer_weights * (layer_itemsize or itemsize)

    def iteration_flops(self, n_tokens: int, n_sampled: int, n_pairs: int) -> int:
        """Returns the number of floating-point operations of an iteration, attention included; a
        multiply-add counts as two.

        `n_sampled` tokens get logits. `n_pairs` is the number of (query, key) pairs of attention,
        summed over the requests.
        """
        n_attention = 4 * self.n_layers * self.n_heads * self.head_dim * n_pairs
        n_products = n_tokens * self.n_layer_weights + n_sampled * self.n_head_weights
        return 2 * n_products + n_attention

    def llama_config(self) -> LlamaConfig:
        """Returns the configuration of a Llama of this shape for the engine."""
        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden,
            n_layers=self.n_layers,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_tokens,
            intermediate_size=self.inner,
            rms_norm_eps=RMS_NORM_EPS,
            rope=RopeConfig(rope_theta=ROPE_THETA),
            checkpoint_dtype="bfloat16",
        )


@dataclass(frozen=True, slots=True)
class MixtureShape:
    """The sizes of one layer's experts in a mixture-of-experts model."""

    hidden: int
    inner: int
    n_experts: int
    n_chosen: int


@dataclass(frozen=True, slots=True)
class Scale:
    """All sizes of one run of the benchmark. Batches and contexts are measured in the order given
    here: the most important ones first, since time may run out."""

    model: ModelShape
    mixture: MixtureShape
    copy_bytes: int
    matrix_size: int
    attention_batches: tuple[int, ...]
    attention_contexts: tuple[int, ...]
    prompts: tuple[int, ...]
    """Lengths of prompts in tokens, each measured alone, for attention and for iterations."""
    chunks: tuple[tuple[int, int], ...]
    """(Stored tokens, tokens of the prompt's next chunk) of each measured chunk."""
    mixed_batches: Mapping[str, tuple[tuple[int, int], ...]]
    """Spans of each mixed batch by its name. A span is (stored tokens, tokens in the batch)."""
    token_counts: tuple[int, ...]
    """Numbers of tokens with which operations other than attention are measured."""
    sampled_rows: tuple[int, ...]
    expert_tokens: tuple[int, ...]
    step_batches: tuple[int, ...]
    step_contexts: tuple[int, ...]
    eager_steps: tuple[tuple[int, int], ...]
    """(Batch size, context in tokens) of each batch of decodes that is also measured without CUDA
    graphs."""
    int8_steps: tuple[tuple[int, int], ...]
    """(Batch size, context in tokens) of each batch of decodes that is also measured with int8
    weights."""
    profiled_steps: tuple[tuple[int, int], ...]
    """(Batch size, context in tokens) of each batch of decodes whose kernels are profiled."""
    static_batches: tuple[tuple[int, int], ...]
    """(Batch size, context in tokens) of each batch of decodes that is measured in
    `transformers`."""
    n_requests: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    kv_bytes: int | None
    """Bytes of device memory for keys and values; None for all free memory."""


LLAMA_8B = ModelShape(
    hidden=4096,
    inner=14336,
    n_layers=32,
    n_heads=32,
    n_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_tokens=16384,
)

FULL = Scale(
    model=LLAMA_8B,
    mixture=MixtureShape(hidden=4096, inner=14336, n_experts=8, n_chosen=2),
    copy_bytes=1 << 32,
    matrix_size=8192,
    attention_batches=(1, 4, 16, 64),
    attention_contexts=(1024, 8192),
    prompts=(512, 2048, 8192),
    chunks=((4096, 512),),
    mixed_batches={
        "64 decodes of 32-1024": tuple((32 + 992 * i // 63, 1) for i in range(64)),
        "one decode of 16k beside 31 of 512": ((16383, 1), *(((511, 1),) * 31)),
        "40 decodes, prompts of 300 and 172": (
            *((32 + 14 * i, 1) for i in range(40)),
            (0, 300),
            (0, 172),
        ),
        "63 decodes of 1k, chunk of 1985 after 2048": (*(((1023, 1),) * 63), (2048, 1985)),
    },
    token_counts=(1, 64, 2048),
    sampled_rows=(1, 16, 64, 256),
    expert_tokens=(1, 16, 64, 512, 4096),
    step_batches=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    step_contexts=(1024, 128, 8192),
    eager_steps=((1, 1024), (16, 1024), (64, 1024), (256, 1024)),
    int8_steps=((1, 1024), (16, 1024), (64, 1024)),
    profiled_steps=((1, 1024), (64, 1024)),
    static_batches=((1, 1024), (16, 1024), (64, 1024), (64, 128)),
    n_requests=64,
    prompt_tokens=(32, 512),
    output_tokens=(1, 128),
    kv_bytes=None,
)

TINY = Scale(
    model=ModelShape(
        hidden=64,
        inner=96,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=16,
        vocab_size=384,
        max_tokens=256,
    ),
    mixture=MixtureShape(hidden=32, inner=48, n_experts=4, n_chosen=2),
    copy_bytes=1 << 22,
    matrix_size=128,
    attention_batches=(1, 2),
    attention_contexts=(40,),
    prompts=(24,),
    chunks=((20, 9),),
    mixed_batches={"a decode and a prompt": ((30, 1), (0, 12))},
    token_counts=(3,),
    sampled_rows=(2,),
    expert_tokens=(5,),
    step_batches=(1, 3),
    step_contexts=(32,),
    eager_steps=((3, 32),),
    int8_steps=((3, 32),),
    profiled_steps=((3, 32),),
    static_batches=((2, 16),),
    n_requests=6,
    prompt_tokens=(4, 24),
    output_tokens=(1, 6),
    kv_bytes=1 << 20,
)
