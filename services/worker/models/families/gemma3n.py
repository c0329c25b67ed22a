"""Gemma 3n, text only: Gemma 3 with several residual streams and inputs for each layer (2025).

A layer predicts all streams, computes one of the streams, and corrects all streams by the
difference (AltUp; Baykal et al., 2023). The output of attention is added to a low-rank product
(Laurel). The MLPs of the first layers set all gates but the largest ones to zero. The last layers
attend to keys and values of earlier layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import AttentionForm
from kernels.packing.linear import pack
from kernels.program import Program
from kernels.steps import Buffer
from kernels.weights.linear import LinearWeight
from services.worker.models.config import (
    Count,
    JsonObject,
    KVSizes,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    read_windows,
    require,
)
from services.worker.models.decoder import RotaryStage
from services.worker.models.decoder_layers import (
    MLP,
    Attention,
    Embedding,
    GatedMLP,
    Head,
    Layer,
    Norm,
)
from services.worker.models.families.gemma3 import split_rope
from services.worker.models.layer_forms import CappedHead, ScaledEmbedding
from services.worker.models.layers import (
    ColumnParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from services.worker.models.normed_attention import (
    KVNorms,
    NormedAttention,
    Projected,
    sources_of,
)
from services.worker.models.per_layer_inputs import (
    PerLayerGate,
    PerLayerTable,
    whole_weight,
)
from services.worker.models.rope import RotaryEmbedding
from services.worker.models.rotary_config import RopeConfig, RotaryConfig, read_rope
from services.worker.models.weights import TensorSource

_ACTIVATION = "gelu_pytorch_tanh"
_FULL, _SLIDING = 0, 1  # indices of the rotary embeddings in `make_rotaries`


@dataclass(frozen=True, kw_only=True)
class SharedKVConfig(RotaryConfig):
    """The fields that the configurations of Gemma 3n and Gemma 4 have in common."""

    read_keys = RotaryConfig.read_keys | {"hidden_activation", "sliding_window", "layer_types"}
    hidden_acts = (_ACTIVATION,)
    default_rope_theta = 1_000_000.0

    attention_bias: bool = False
    final_logit_softcapping: PositiveFloat | None = None
    windows: tuple[PositiveInt | None, ...]
    sliding_rope: RopeConfig  # for layers with a window; `rope` is for all others
    n_shared_layers: NonNegativeInt = field(default=0, metadata={"alias": "num_kv_shared_layers"})
    per_layer_size: NonNegativeInt = field(
        default=256, metadata={"alias": "hidden_size_per_layer_input"}
    )
    per_layer_vocab_size: PositiveInt = field(
        default=262_144, metadata={"alias": "vocab_size_per_layer_input"}
    )
    tie_word_embeddings: bool = True

    @property
    def layer_windows(self) -> Sequence[int | None]:
        return self.windows

    @property
    def full(self) -> Self:
        """This configuration, with the attention settings of layers without a window."""
        return self

    @property
    def sliding(self) -> Self:
        """This configuration, with the attention settings of layers with a window."""
        return replace(self, rope=self.sliding_rope)

    @property
    def kv_sources(self) -> Sequence[int]:
        return sources_of(self.windows, self.n_shared_layers)

    @property
    def layer_kv(self) -> Sequence[KVSizes]:
        full, sliding = (
            KVSizes(each.n_kv_heads, each.head_dim, each.head_dim)
            for each in (self.full, self.sliding)
        )
        return tuple(
            KVSizes(0, 0, 0) if source != i else full if self.windows[i] is None else sliding
            for i, source in enumerate(self.kv_sources)
        )

    def check(self) -> None:
        for kind in (self.full, self.sliding):
            RotaryConfig.check(kind)
        sources_of(self.windows, self.n_shared_layers)

    @classmethod
    def read_shared(cls, config: JsonObject, rope: JsonObject | None) -> dict[str, Any]:
        """Returns the fields that are read from several keys, except the windows.

        `rope` holds the rotary settings of both kinds of layers in files with the newer spelling.
        """
        require(config, hidden_activation=(_ACTIVATION, None))
        full, sliding = split_rope({**config, "rope_parameters": rope})
        fields = super().read({"head_dim": 256, **config, **full}) | {
            "sliding_rope": read_rope(sliding, default_theta=10_000.0)
        }
        cap = "final_logit_softcapping"
        if (
            cap in config and config[cap] is None
        ):  # null switches the cap off; a missing key does not
            fields[cap] = None
        return fields


class SharedKVStage(RotaryStage):
    """One stage of a Gemma 3n or Gemma 4 model: the parts that these models have in common."""

    config: SharedKVConfig

    @property
    def stream_size(self) -> int:
        """Number of elements that the residual streams take in a row of hidden states. The
        per-layer inputs follow them in the row."""
        return self.config.hidden_size

    @property
    def hidden_size(self) -> int:
        return self.stream_size + self.config.n_layers * self.config.per_layer_size

    def make_rotaries(self) -> Sequence[RotaryEmbedding]:
        return [  # _FULL, _SLIDING
            RotaryEmbedding(kind, dtype=self.dtype, device=self.device)
            for kind in (self.config.full, self.config.sliding)
        ]

    def read_scale(self, source: TensorSource, name: str, size: int) -> Tensor:
        return (
            super().read_scale(source, name, size).float()
        )  # kept in float32: the scaled result is rounded

    def plain_norm(self, size: int) -> RMSNorm:
        """Returns a norm without a learned scale."""
        return RMSNorm(torch.ones(size, device=self.device), self.config.rms_norm_eps)

    def scaled(self, tokens: Embedding) -> Embedding:
        """Returns the embedding of tokens, scaled by the square root of the hidden size."""
        return ScaledEmbedding(tokens, self._rounded(self.config.hidden_size**0.5))

    def read_per_layer_table(self, source: TensorSource) -> PerLayerTable:
        """Reads the table and the projection that compute the per-layer inputs of all layers."""
        config, name = self.config, "model.per_layer_model_projection"
        size = config.per_layer_size
        width = config.n_layers * size
        return PerLayerTable(
            VocabParallelEmbedding.read(
                source,
                "model.embed_tokens_per_layer.weight",
                vocab_size=config.per_layer_vocab_size,
                hidden_size=width,
            ),
            self._rounded(size**0.5),
            whole_weight(source, name, width, config.hidden_size),
            config.hidden_size**-0.5,
            self.read_rms_norm(source, "model.per_layer_projection_norm", size),
            size,
        )

    def read_per_layer_gate(self, source: TensorSource, prefix: str, index: int) -> PerLayerGate:
        """Reads the gate of the per-layer inputs of layer `index`."""
        hidden_size, size = self.config.hidden_size, self.config.per_layer_size
        return PerLayerGate.read(
            source,
            prefix,
            hidden_size=hidden_size,
            size=size,
            begin=self.stream_size + index * size,
            norm=self.read_norm(source, f"{prefix}.post_per_layer_input_norm", hidden_size),
        )

    def projected(self, index: int) -> Projected:
        """Returns which projections the attention of layer `index` computes.

        The result is "q" for a layer that attends to the keys and values of an earlier layer,
        otherwise "qkv".
        """
        return "qkv" if self.config.kv_sources[index] == index else "q"

    def read_attention(self, source: TensorSource, prefix: str, index: int) -> Attention:
        window, projected = self.config.layer_windows[index], self.projected(index)
        config = self.config.full if window is None else self.config.sliding
        size, kv_norms = config.head_dim, None
        if projected != "q":
            kv_norms = KVNorms(
                self.read_rms_norm(source, f"{prefix}.k_norm", size), self.plain_norm(size)
            )
        return NormedAttention.read_normed(
            source,
            prefix,
            config,
            projected=projected,
            form=AttentionForm(window=window, scale=1.0),
            rotary=_FULL if window is None else _SLIDING,
            has_bias=config.attention_bias,
            q_norm=self.read_rms_norm(source, f"{prefix}.q_norm", size),
            kv_norms=kv_norms,
        )

    def read_mlp(self, source: TensorSource, prefix: str, index: int) -> MLP:
        size = self.mlp_size(index)
        return GatedMLP.read(source, prefix, self.config, size=size, gate="gelu_tanh")

    def mlp_size(self, index: int) -> int:
        """Returns the inner size of the MLP of layer `index`."""
        return self.config.intermediate_size

    def read_head(self, source: TensorSource) -> Head:
        head, cap = super().read_head(source), self.config.final_logit_softcapping
        return head if cap is None else CappedHead(head, cap)

    def _rounded(self, factor: float) -> float:
        """Returns `factor` rounded to the model's element type, as in training."""
        return torch.tensor(factor, dtype=self.dtype).item()


@dataclass(frozen=True, kw_only=True)
class Gemma3nConfig(SharedKVConfig):
    """Counterpart of Hugging Face's `Gemma3nTextConfig`."""

    architecture = "Gemma3nForCausalLM"
    default_eos_token_ids = (1,)
    read_keys = SharedKVConfig.read_keys | {
        "rope_local_base_freq", "intermediate_size", "activation_sparsity_pattern",
    }  # fmt: skip
    # The first two matter to training only; the scores of these models are not scaled.
    ignored_keys = frozenset(("altup_coef_clip", "altup_lr_multiplier", "query_pre_attn_scalar"))

    final_logit_softcapping: PositiveFloat | None = 30.0
    n_shared_layers: NonNegativeInt = field(default=15, metadata={"alias": "num_kv_shared_layers"})
    n_streams: Count = field(default=4, metadata={"alias": "altup_num_inputs"})
    active_stream: NonNegativeInt = field(default=0, metadata={"alias": "altup_active_idx"})
    scales_corrected: bool = field(default=True, metadata={"alias": "altup_correct_scale"})
    laurel_rank: PositiveInt = 64
    intermediate_sizes: tuple[PositiveInt, ...]  # of each layer
    sparsities: tuple[NonNegativeFloat, ...]  # share of gates set to zero, for each layer

    def check(self) -> None:
        super().check()
        if self.active_stream >= self.n_streams:
            raise ValueError(
                f"altup_active_idx ({self.active_stream}) is not below altup_num_inputs "
                f"({self.n_streams})"
            )
        if self.per_layer_size == 0:
            raise ValueError("hidden_size_per_layer_input is 0")
        for key, values in (
            ("intermediate_size", self.intermediate_sizes),
            ("activation_sparsity_pattern", self.sparsities),
        ):
            if len(values) != self.n_layers:
                raise ValueError(f"{key} has {len(values)} entries for {self.n_layers} layers")
        if max(self.sparsities) >= 1:
            raise ValueError(f"activation_sparsity_pattern has {max(self.sparsities)}, no share")

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        n_layers = config.get("num_hidden_layers") or 0
        sizes = config.get("intermediate_size", 16_384)
        if isinstance(sizes, int):
            sizes = [sizes] * n_layers
        sparsities = config.get("activation_sparsity_pattern")
        if sparsities is None:
            sparsities = [0.95 if i < 10 < n_layers else 0.0 for i in range(n_layers)]
        sliding = [(i + 1) % 5 != 0 for i in range(n_layers)]
        window = config.get("sliding_window", 512)
        given = {"num_key_value_heads": 2, **config}
        return cls.read_shared(given, config.get("rope_parameters")) | {
            "windows": read_windows(config, window=window, default=sliding),
            "intermediate_size": max(sizes),
            "intermediate_sizes": sizes,
            "sparsities": sparsities,
        }


@dataclass(frozen=True, slots=True)
class SparseMLP:
    """This rank's share of an MLP that sets all gates of a token below a limit to zero.

    The limit is `n_deviations` standard deviations above the mean of the token's gates.
    """

    gate_up: ColumnParallelLinear
    down: RowParallelLinear
    size: int  # number of gates on all ranks
    n_deviations: float

    @classmethod
    def read(
        cls,
        source: TensorSource,
        prefix: str,
        *,
        hidden_size: int,
        size: int,
        sparsity: float,
    ) -> Self:
        """Reads `gate_proj`, `up_proj` and `down_proj` under `prefix`.

        `sparsity` is the share of gates that become zero if gates are normally distributed.
        """
        names = [f"{prefix}.{name}_proj" for name in ("gate", "up")]
        gate_up = ColumnParallelLinear.read(
            source, names, n_in=hidden_size, n_out=(size, size), has_bias=False
        )
        down = RowParallelLinear.read(
            source, f"{prefix}.down_proj", n_in=size, n_out=hidden_size, has_bias=False
        )
        return cls(gate_up, down, size, NormalDist().inv_cdf(sparsity))

    def describe(self, to: Program, x: Buffer, residual: Buffer | None = None) -> Buffer:
        """Adds the steps of the MLP to a program, as `MLP.describe` specifies."""
        both = self.gate_up.describe(to, x)
        gates = to.buffer(both.width // 2, torch.float32)
        total, squares = to.buffer(1, torch.float32), to.buffer(1, torch.float32)
        to.call("sums of gates", _with_sums, (both,), gates, total)
        to.all_reduce(total)
        to.call("squared deviations of gates", self._squares, (gates, total), squares)
        to.all_reduce(squares)
        to.call("closed gates", self._closed, (both, gates, total, squares), both)
        return self.down.describe(to, to.gate("gelu_tanh", both), residual)

    def _squares(self, gates: Tensor, total: Tensor) -> Tensor:
        """Returns the sum of squared deviations of this rank's gates from the mean,
        [n_tokens, 1]."""
        return (gates - total / self.size).square().sum(-1, keepdim=True)

    def _closed(self, both: Tensor, gates: Tensor, total: Tensor, squares: Tensor) -> Tensor:
        """Overwrites the first half of `both` with the gates minus the limit, or with zero for
        gates below the limit, and returns `both`."""
        limit = total / self.size + self.n_deviations * (squares / self.size).sqrt()
        both[:, : gates.shape[1]] = F.relu(gates - limit)
        return both


def _with_sums(both: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gates, which are the first half of `both`, and the sum of each token's gates on
    this rank. Both are float32."""
    gates = both[:, : both.shape[1] // 2].to(torch.float32, copy=True)
    return gates, gates.sum(-1, keepdim=True)


@dataclass(frozen=True, slots=True)
class AltUp:
    """Predicts the residual streams after a layer, and corrects the prediction.

    A layer computes only one stream, from which the correction of all streams is derived. Streams
    are [n_tokens, n_streams, hidden]. Sums over streams are computed in float32, stream by stream.
    """

    norm: Norm
    router: LinearWeight  # [n_streams, hidden]
    predicting: LinearWeight  # [n_streams * n_streams, n_streams]
    correcting: LinearWeight  # [n_streams, n_streams]
    n_streams: int
    active: int  # index of the stream that the layer computes
    factor: float  # factor of the router's input

    @classmethod
    def read(cls, source: TensorSource, prefix: str, config: Gemma3nConfig, norm: Norm) -> Self:
        """Reads the matrices under `prefix`, which are not quantised."""

        def weight(name: str, n_out: int, n_in: int) -> LinearWeight:
            return pack(source.tensor(f"{prefix}.{name}.weight", n_out, n_in))

        n = config.n_streams
        return cls(
            norm,
            weight("modality_router", n, config.hidden_size),
            weight("prediction_coefs", n * n, n),
            weight("correction_coefs", n, n),
            n,
            config.active_stream,
            config.hidden_size**-1.0,
        )

    def describe_routed(self, to: Program, active: Buffer) -> Buffer:
        """Adds a step to a program, and returns the router's output for the active stream,
        [n_tokens, n_streams]."""
        normed = self.norm.describe(to, active)
        return to.multiply(self.router, to.scale(normed, self.factor))

    def predict(self, routed: Tensor, streams: Tensor) -> Tensor:
        """Returns the predicted streams after the layer, in the shape of `streams`.

        `routed` is the router's output for the active stream before the layer.
        """
        coefs = self.predicting(_modes(routed)).float()
        coefs = coefs.view(-1, self.n_streams, self.n_streams)  # [n_tokens, to, from]
        wide = streams.float()
        predicted = wide.clone()
        for i in range(self.n_streams):
            predicted += coefs[:, :, i, None] * wide[:, i, None]
        return predicted.to(streams.dtype)

    def correct(self, routed: Tensor, predicted: Tensor, computed: Tensor) -> Tensor:
        """Returns all predicted streams, each corrected by its part of the active stream's
        prediction error.

        The error is `computed` [n_tokens, hidden] minus the prediction. `routed` is the router's
        output for `computed`.
        """
        coefs = self.correcting(_modes(routed)) + 1
        surprise = computed - predicted[:, self.active]
        return predicted + coefs[:, :, None] * surprise[:, None]


def _modes(routed: Tensor) -> Tensor:
    """Returns the coefficients of prediction and correction: the tanh of the router's output,
    [n_tokens, n_streams]."""
    return torch.tanh(routed.float()).to(routed.dtype)


@dataclass(frozen=True, slots=True)
class Laurel:
    """A low-rank product. The result is added to the output of attention."""

    left: LinearWeight  # [rank, hidden]
    right: LinearWeight  # [hidden, rank]
    norm: Norm

    def describe(self, to: Program, x: Buffer) -> Buffer:
        """Adds a step to a program, and returns `x` plus the normalised low-rank product,
        [n_tokens, hidden]. The step may overwrite `x`."""
        low = to.multiply(self.left, x)
        return to.add(x, self.norm.describe(to, to.multiply(self.right, low)))


@dataclass(frozen=True, slots=True)
class StreamsLayer:
    """A layer that predicts all streams, computes the active one, and corrects all streams."""

    altup: AltUp
    attention_norm: Norm
    laurel: Laurel
    attention: Attention
    attended_norm: Norm
    mlp_norm: Norm
    mlp: MLP
    mlp_out_norm: Norm
    per_layer: PerLayerGate
    scale: Tensor | None  # [hidden], of the corrected stream that sees the layer's own inputs

    def describe(self, to: Program, hidden: Buffer, layer: int) -> Buffer:
        altup, size, n_all = self.altup, self.size, self.altup.n_streams * self.size
        predicted, corrected, scaled = to.buffer(n_all), to.buffer(n_all), to.buffer(size)
        routed = altup.describe_routed(to, to.take_part(hidden, altup.active * size, size))
        to.call("predicted streams", self._predicted, (routed, hidden), predicted)
        active = to.take_part(predicted, altup.active * size, size)
        computed = self._describe_active(to, active, layer)
        routed = altup.describe_routed(to, computed)
        inputs = routed, predicted, computed
        to.call("corrected streams", self._corrected, inputs, corrected, scaled)
        own = self.per_layer.describe(to, scaled, hidden)
        to.call("sum of streams and inputs", self._with_inputs, (corrected, own), corrected)
        to.copy_part(corrected, 0, n_all, hidden, 0)
        return hidden

    def _describe_active(self, to: Program, active: Buffer, layer: int) -> Buffer:
        """Adds attention and the MLP to a program, and returns the active stream after them. The
        steps may overwrite `active`."""
        normed = self.attention_norm.describe(to, active)
        attended = self.attended_norm.describe(to, self.attention.describe(to, normed, layer))
        attended = to.add(to.add(active, attended), self.laurel.describe(to, normed))
        attended = to.scale(attended, 2**-0.5)
        changed = self.mlp.describe(to, self.mlp_norm.describe(to, attended))
        return to.add(attended, self.mlp_out_norm.describe(to, changed))

    @property
    def size(self) -> int:
        """The number of elements of a stream."""
        return self.per_layer.projection.shape[0]

    def _streams(self, rows: Tensor) -> Tensor:
        """Returns the streams as [n_tokens, n_streams, hidden]. They are the first elements of
        `rows`."""
        return _streams(rows, self.altup.n_streams, self.size)

    def _predicted(self, routed: Tensor, hidden: Tensor) -> Tensor:
        return self.altup.predict(routed, self._streams(hidden)).flatten(1)

    def _corrected(
        self, routed: Tensor, predicted: Tensor, computed: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the corrected streams, and the scaled active stream. The gates of the per-layer
        inputs are computed from the latter."""
        corrected = self.altup.correct(routed, self._streams(predicted), computed)
        active = corrected[:, self.altup.active]
        scaled = active.clone() if self.scale is None else active * self.scale
        return corrected.flatten(1), scaled

    def _with_inputs(self, corrected: Tensor, own: Tensor) -> Tensor:
        """Adds the gated per-layer inputs `own` to all streams of `corrected` except the
        first one."""
        self._streams(corrected)[:, 1:] += own[:, None]
        return corrected


def _streams(rows: Tensor, n_streams: int, size: int) -> Tensor:
    """Returns the streams as [n_tokens, n_streams, hidden]. They are the first elements of
    `rows`."""
    return rows[:, : n_streams * size].view(-1, n_streams, size)


def _mean_square(x: Tensor) -> Tensor:
    """Returns the mean square of each row of `x` [n_tokens, size], as [n_tokens, 1] in float32."""
    return x.float().square().sum(-1, keepdim=True) / x.shape[-1]


@dataclass(frozen=True, slots=True)
class StreamsEmbedding:
    """Embeds tokens as the first stream, computes the other streams as projections of the first,
    and appends the per-layer inputs."""

    tokens: Embedding
    projections: Sequence[LinearWeight]  # [hidden, hidden], of the streams after the first
    per_layer: PerLayerTable

    def describe(self, to: Program) -> Buffer:
        first = self.tokens.describe(to)
        others = [to.buffer(first.width) for _ in self.projections]
        to.call("streams of embeddings", self._others, (first,), *others)
        return to.join(first, *others, self.per_layer.describe(to, first))

    def _others(self, first: Tensor) -> tuple[Tensor, ...]:
        """Computes the streams after the first one. Each has the shape of `first`."""
        magnitude = _mean_square(first).sqrt()
        others = (_of_magnitude(weight(first), magnitude) for weight in self.projections)
        return tuple(each.to(first.dtype) for each in others)


def _of_magnitude(x: Tensor, magnitude: Tensor) -> Tensor:
    """Returns `x` in float32, scaled so that each row has the root mean square `magnitude`
    [n_tokens, 1]."""
    return x.float() * magnitude / _mean_square(x).clamp(min=1e-5).sqrt()


@dataclass(frozen=True, slots=True)
class StreamsHead:
    """A head that computes logits from the mean of all streams. Every stream except the first is
    projected before the mean is taken."""

    head: Head
    projections: Sequence[LinearWeight]  # [hidden, hidden]
    size: int  # of a stream

    def describe(self, to: Program, hidden: Buffer) -> Buffer:
        mean = to.buffer(self.size, is_of_sampled=hidden.is_of_sampled)
        to.call("mean of streams", self._mean, (hidden,), mean)
        return self.head.describe(to, mean)

    def _mean(self, hidden: Tensor) -> Tensor:
        """Returns the mean of all streams, [n_tokens, size]."""
        n_streams = len(self.projections) + 1
        first, *others = _streams(hidden, n_streams, self.size).unbind(1)
        magnitude = _mean_square(first).sqrt()
        total = first.float()
        for stream, weight in zip(others, self.projections, strict=True):
            total = total + _of_magnitude(weight(stream.contiguous()), magnitude)
        return (total / n_streams).to(hidden.dtype)


class Gemma3nStage(SharedKVStage):
    """One stage of a Gemma 3n text model."""

    config_type = Gemma3nConfig
    config: Gemma3nConfig

    @property
    def stream_size(self) -> int:
        return self.config.n_streams * self.config.hidden_size

    def read_embedding(self, source: TensorSource, tokens: Embedding) -> Embedding:
        projections = self._read_projections(source, "model.altup_projections")
        return StreamsEmbedding(self.scaled(tokens), projections, self.read_per_layer_table(source))

    def read_layer(self, source: TensorSource, prefix: str, index: int) -> Layer:
        size, rank = self.config.hidden_size, self.config.laurel_rank

        def norm(name: str) -> Norm:
            return self.read_norm(source, f"{prefix}.{name}", size)

        laurel = Laurel(
            whole_weight(source, f"{prefix}.laurel.linear_left", rank, size),
            whole_weight(source, f"{prefix}.laurel.linear_right", size, rank),
            norm("laurel.post_laurel_norm"),
        )
        scale = source.tensor(f"{prefix}.altup.correct_output_scale", size)
        return StreamsLayer(
            AltUp.read(source, f"{prefix}.altup", self.config, norm("altup.router_norm")),
            norm("input_layernorm"),
            laurel,
            self.read_attention(source, f"{prefix}.self_attn", index),
            norm("post_attention_layernorm"),
            norm("pre_feedforward_layernorm"),
            self.read_mlp(source, f"{prefix}.mlp", index),
            norm("post_feedforward_layernorm"),
            self.read_per_layer_gate(source, prefix, index),
            scale if self.config.scales_corrected else None,
        )

    def read_mlp(self, source: TensorSource, prefix: str, index: int) -> MLP:
        sparsity = self.config.sparsities[index]
        if not sparsity:
            return super().read_mlp(source, prefix, index)
        return SparseMLP.read(
            source,
            prefix,
            hidden_size=self.config.hidden_size,
            size=self.mlp_size(index),
            sparsity=sparsity,
        )

    def mlp_size(self, index: int) -> int:
        return self.config.intermediate_sizes[index]

    def read_head(self, source: TensorSource) -> Head:
        projections = self._read_projections(source, "model.altup_unembed_projections")
        return StreamsHead(super().read_head(source), projections, self.config.hidden_size)

    def _read_projections(self, source: TensorSource, name: str) -> Sequence[LinearWeight]:
        size, n = self.config.hidden_size, self.config.n_streams - 1
        return [whole_weight(source, f"{name}.{i}", size, size) for i in range(n)]
