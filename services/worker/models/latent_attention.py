"""Multi-head latent attention: a token is stored as one latent for all heads (DeepSeek-AI, 2024).

A latent is a short vector, computed for each token. The keys and values of all heads are products
of the latent and matrices. In addition, a part of the key is rotated with the position and is equal
in all heads. The latent and this rotated part are stored once for all heads, and every rank stores
a copy.

Keys and values of heads are never computed. A score is `q . (K latent)`, which equals `(K' q) .
latent`. A weighted sum of values `V latent` equals `V` times the weighted sum of latents. So
queries are multiplied by the K of their head. They attend over latents as if all heads shared one
K/V head, and the result is multiplied by V. A key of this attention is a latent followed by the
rotated part. A value is the latent, which is the beginning of the key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from kernels import AttentionForm
from kernels.packing.heads import pack_heads
from kernels.program import Program
from kernels.steps import Buffer, Heads
from kernels.weights.head_products import HeadProducts
from services.worker.models.config import JsonObject, KVSizes, PositiveInt, UnsupportedModel
from services.worker.models.decoder import RotaryStage
from services.worker.models.decoder_layers import Layer, Norm, PreNormLayer
from services.worker.models.layers import ColumnParallelLinear, RMSNorm, RowParallelLinear
from services.worker.models.rotary_config import RotaryConfig, yarn_scale
from services.worker.models.tensor_parallel import HeadShare
from services.worker.models.weights import Shard, TensorSource

_LATENT_NORM_EPS = 1e-6  # of the norms of latents; rms_norm_eps is not used


@dataclass(frozen=True, kw_only=True)
class LatentConfig(RotaryConfig):
    """The fields of decoders with latent attention. Here `head_dim` is the size of the rotated part
    of a head."""

    read_keys = RotaryConfig.read_keys | {
        "q_lora_rank", "qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim",
    }  # fmt: skip
    default_query_rank: ClassVar[int] = 1536
    default_still_dim: ClassVar[int] = 128
    default_turned_dim: ClassVar[int] = 64

    query_rank: PositiveInt | None  # size of the query latent; None: no latent
    latent_dim: PositiveInt = field(default=512, metadata={"alias": "kv_lora_rank"})
    still_dim: PositiveInt  # size of the part of a head's query that is not rotated
    value_dim: PositiveInt = field(default=128, metadata={"alias": "v_head_dim"})
    attention_bias: bool = False  # of the projections to latents, and of the output
    # Whether files store the two elements of a rotated pair side by side, not half a head apart.
    has_pairs: bool = field(default=True, metadata={"alias": "rope_interleave"})

    @property
    def query_dim(self) -> int:
        """The size of a head's query, which consists of a part that is not rotated and a rotated
        part."""
        return self.still_dim + self.head_dim

    @property
    def layer_kv(self) -> Sequence[KVSizes]:
        return (KVSizes(1, self.latent_dim + self.head_dim, 0),) * self.n_layers

    @property
    def score_scale(self) -> float:
        """The factor by which attention scores are multiplied. It is larger if "yarn" has stretched
        the context."""
        scale = float(self.query_dim**-0.5)
        if self.rope.factor is not None and self.rope.mscale_all_dim:
            scale *= yarn_scale(self.rope.factor, self.rope.mscale_all_dim) ** 2
        return scale

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        turned_dim = config.get("qk_rope_head_dim") or cls.default_turned_dim
        still_dim = config.get("qk_nope_head_dim") or cls.default_still_dim
        # Files repeat sizes that follow from other keys.
        said = {
            "num_key_value_heads": config.get("num_attention_heads"),
            "head_dim": turned_dim,
            "qk_head_dim": still_dim + turned_dim,
        }
        for key, value in said.items():
            if config.get(key) not in (None, value):
                raise UnsupportedModel(f"config.json: {key} is {config[key]!r} and not {value!r}")
        rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if rope.get("mscale_all_dim") and kind not in ("default", "yarn"):
            raise UnsupportedModel(f"config.json: mscale_all_dim of rope_type {kind!r}")
        return super().read({**config, "head_dim": turned_dim, "num_key_value_heads": 1}) | {
            "query_rank": config.get("q_lora_rank", cls.default_query_rank),
            "still_dim": still_dim,
        }


@dataclass(frozen=True, slots=True)
class QueryLatent:
    """Computes the latent from which the queries of all heads are made. Every rank computes all of
    the latent."""

    down: ColumnParallelLinear
    norm: Norm

    def describe(self, to: Program, x: Buffer) -> Buffer:
        """Adds the steps of this projection to a program, and returns the query latents, [n_tokens,
        query_rank]."""
        return self.norm.describe(to, self.down.describe(to, x))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """This rank's heads of multi-head latent attention."""

    query_latent: QueryLatent | None
    queries: (
        ColumnParallelLinear  # for each head: the part that is not rotated, then the rotated part
    )
    latent: ColumnParallelLinear  # whole on every rank: the latent, then the rotated part of keys
    latent_norm: RMSNorm
    to_latents: HeadProducts  # from the part of queries that is not rotated
    to_values: HeadProducts
    output: RowParallelLinear
    n_heads: int
    still_dim: int
    latent_dim: int
    form: AttentionForm

    @classmethod
    def read(cls, source: TensorSource, prefix: str, config: LatentConfig) -> Self:
        """Reads the projections under `prefix`."""
        heads = HeadShare.of(config, source.tp_rank, source.tp_size).q
        still, latent_dim, value_dim = config.still_dim, config.latent_dim, config.value_dim
        to_latents, to_values = _read_head_matrices(source, f"{prefix}.kv_b_proj", config, heads)
        values = range(heads.start * value_dim, heads.stop * value_dim)
        return cls(
            query_latent=_read_query_latent(source, prefix, config),
            queries=_read_queries(source, prefix, config, heads),
            latent=_read_whole(
                source,
                f"{prefix}.kv_a_proj_with_mqa",
                config,
                n_out=latent_dim + config.head_dim,
                order=_turned_order(config, n_before=latent_dim, n_heads=1),
            ),
            latent_norm=_read_norm(source, f"{prefix}.kv_a_layernorm", latent_dim),
            to_latents=pack_heads(to_latents),
            to_values=pack_heads(to_values),
            output=RowParallelLinear.read(
                source,
                f"{prefix}.o_proj",
                n_in=config.n_heads * value_dim,
                n_out=config.hidden_size,
                share=values,
                has_bias=config.attention_bias,
            ),
            n_heads=len(heads),
            still_dim=still,
            latent_dim=latent_dim,
            form=AttentionForm(scale=config.score_scale),
        )

    def describe(
        self, to: Program, x: Buffer, layer: int, residual: Buffer | None = None
    ) -> Buffer:
        """Adds the steps to a program, as `Mixer.describe` specifies."""
        stored = self._describe_stored(to, x, layer)
        q = self._describe_queries(to, x, stored.width)
        heads = Heads(n_heads=self.n_heads, n_kv_heads=1, head_dim=stored.width)
        attended = to.attend(q, heads, self.form, None, layer=layer, n_shared=self.latent_dim)
        values = to.buffer(self.n_heads * self.to_values.shape[1])
        to.multiply_heads(self.to_values, attended, values)
        return self.output.describe(to, values, residual)

    def _describe_stored(self, to: Program, x: Buffer, layer: int) -> Buffer:
        """Adds the steps that store each token's normalised latent and the rotated part of its key.
        Returns the stored rows, [n_tokens, latent_dim + head_dim]."""
        made = self.latent.describe(to, x)
        self.latent_norm.describe_parts(to, made, 0, 1)
        to.turn_heads(made, made, n_heads=1, rotary=0, size=made.width - self.latent_dim)
        to.write_latents(made, layer=layer)
        return made

    def _describe_queries(self, to: Program, x: Buffer, key_dim: int) -> Buffer:
        """Adds the steps that compute the queries over latents. The result has `key_dim` elements
        for each head."""
        if self.query_latent is not None:
            x = self.query_latent.describe(to, x)
        q, of_latents = self.queries.describe(to, x), to.buffer(self.n_heads * key_dim)
        to.multiply_heads(self.to_latents, q, of_latents)
        n_turned = key_dim - self.latent_dim
        to.turn_heads(q, of_latents, n_heads=self.n_heads, rotary=0, size=n_turned)
        return of_latents


class LatentStage(RotaryStage):
    """One stage of a decoder with latent attention. Families override how MLPs are read."""

    config: LatentConfig

    def read_layer(self, source: TensorSource, prefix: str, index: int) -> Layer:
        hidden_size = self.config.hidden_size
        return PreNormLayer(
            self.read_norm(source, f"{prefix}.input_layernorm", hidden_size),
            LatentAttention.read(source, f"{prefix}.self_attn", self.config),
            self.read_norm(source, f"{prefix}.post_attention_layernorm", hidden_size),
            self.read_mlp(source, f"{prefix}.mlp", index),
        )


def _read_query_latent(
    source: TensorSource, prefix: str, config: LatentConfig
) -> QueryLatent | None:
    if config.query_rank is None:
        return None
    return QueryLatent(
        _read_whole(source, f"{prefix}.q_a_proj", config, n_out=config.query_rank),
        _read_norm(source, f"{prefix}.q_a_layernorm", config.query_rank),
    )


def _read_queries(
    source: TensorSource, prefix: str, config: LatentConfig, heads: range
) -> ColumnParallelLinear:
    """Reads the projection that computes the queries of `heads`. Its input is the query latent, or
    the hidden states if the model has no query latent."""
    name = "q_proj" if config.query_rank is None else "q_b_proj"
    size = config.query_dim
    return ColumnParallelLinear.read(
        source,
        [f"{prefix}.{name}"],
        n_in=config.query_rank or config.hidden_size,
        n_out=[config.n_heads * size],
        shares=[range(heads.start * size, heads.stop * size)],
        has_bias=False,
        order=_turned_order(config, n_before=config.still_dim, n_heads=len(heads)),
    )


def _read_whole(
    source: TensorSource,
    name: str,
    config: LatentConfig,
    *,
    n_out: int,
    order: Tensor | None = None,
) -> ColumnParallelLinear:
    """Reads a projection of hidden states that every rank holds whole."""
    return ColumnParallelLinear.read(
        source,
        [name],
        n_in=config.hidden_size,
        n_out=[n_out],
        shares=[range(n_out)],
        has_bias=config.attention_bias,
        order=order,
    )


def _read_norm(source: TensorSource, name: str, size: int) -> RMSNorm:
    return RMSNorm(source.tensor(f"{name}.weight", size), _LATENT_NORM_EPS)


def _read_head_matrices(
    source: TensorSource, name: str, config: LatentConfig, heads: range
) -> tuple[Tensor, Tensor]:
    """Reads the matrices that turn latents into keys and values, for the heads `heads`.

    Returns two tensors: [n_heads, latent_dim, still_dim], which turns queries into queries over
    latents, and [n_heads, value_dim, latent_dim], which turns latents into values.
    """
    size = config.still_dim + config.value_dim
    rows = range(heads.start * size, heads.stop * size)
    shape = (config.n_heads * size, config.latent_dim)
    both = source.tensor(f"{name}.weight", *shape, shard=Shard(0, rows))
    both = both.view(len(heads), size, config.latent_dim)
    return both[:, : config.still_dim].transpose(1, 2), both[:, config.still_dim :]


def _turned_order(config: LatentConfig, *, n_before: int, n_heads: int) -> Tensor | None:
    """Returns the stored index of each element of `n_heads` heads, for an order in which each head
    has the first elements of all rotated pairs before the second elements. Returns None if the file
    already has this order.

    The first `n_before` elements of a head are not rotated and stay in place.
    """
    if not config.has_pairs:
        return None
    size = n_before + config.head_dim
    of_head = [*range(n_before), *range(n_before, size, 2), *range(n_before + 1, size, 2)]
    return (torch.arange(n_heads)[:, None] * size + torch.tensor(of_head)).flatten()
