"""OLMo 2: norms after attention and MLP, and over all heads together (OLMo Team, 2024).

One norm is over all heads of queries, another one over all heads of keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from kernels import AttentionForm
from kernels.program import Program
from kernels.steps import Buffer
from services.worker.models.config import ModelConfig
from services.worker.models.decoder_layers import Attention
from services.worker.models.post_norm_stage import PostNormStage
from services.worker.models.rotary_config import RotaryConfig
from services.worker.models.tensor_parallel import HeadShare
from services.worker.models.weights import Part, Shard, TensorSource


@dataclass(frozen=True, kw_only=True)
class Olmo2Config(RotaryConfig):
    """Counterpart of Hugging Face's `Olmo2Config`."""

    architecture = "Olmo2ForCausalLM"
    default_eos_token_ids = (50279,)

    attention_bias: bool = False


@dataclass(frozen=True, slots=True)
class WideNorms:
    """Root-mean-square norms: one over all query heads together, and one over all key heads
    together.

    A rank normalises its own heads, by the mean square over the heads of all ranks.
    """

    weight: Tensor  # [n_q + n_k], of the elements of this rank's queries and then of its keys
    n_q: int
    n_all_q: int  # elements on all ranks, like n_all_k
    n_all_k: int
    n_copies: int  # number of ranks with copies of each K/V head
    eps: float

    @classmethod
    def read(cls, source: TensorSource, prefix: str, config: RotaryConfig) -> Self:
        """Reads this rank's shares of `q_norm` and `k_norm` under `prefix`."""
        heads = HeadShare.of(config, source.tp_rank, source.tp_size)
        q, k = heads.q_elements(config), heads.kv_elements(config)
        n_all_q, n_all_k = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        parts = (
            Part(f"{prefix}.q_norm.weight", (n_all_q,), Shard(0, q)),
            Part(f"{prefix}.k_norm.weight", (n_all_k,), Shard(0, k)),
        )
        return cls(
            source.joined(parts),
            n_q=len(q),
            n_all_q=n_all_q,
            n_all_k=n_all_k,
            n_copies=source.tp_size * len(k) // n_all_k,
            eps=config.rms_norm_eps,
        )

    def describe(self, to: Program, qkv: Buffer) -> None:
        """Adds steps to a program that normalise the queries and keys of `qkv` [n_tokens, n_q + n_k
        + n_v] in place."""
        if to.tp_size == 1:
            for first, weight in self._parts():
                to.rms_norm_parts(qkv, first, weight, self.eps)
            return
        means = to.buffer(2, torch.float32)
        to.call("mean squares of this rank's heads", self._means, (qkv,), means)
        to.all_reduce(means)
        normed = to.buffer(len(self.weight))
        to.call("norms over the heads of all ranks", self._normed, (qkv, means), normed)
        to.copy_part(normed, 0, normed.width, qkv, 0)

    def _means(self, qkv: Tensor) -> Tensor:
        """Returns this rank's contribution to the mean squares of queries and of keys, [n_tokens,
        2] in float32."""
        squares = qkv[:, : len(self.weight)].float().square()
        q, k = squares[:, : self.n_q].sum(-1), squares[:, self.n_q :].sum(-1)
        return torch.stack((q / self.n_all_q, k / (self.n_all_k * self.n_copies)), 1)

    def _normed(self, qkv: Tensor, means: Tensor) -> Tensor:
        """Returns the normalised queries and keys, [n_tokens, n_q + n_k]. `means` are the mean
        squares over all ranks."""
        scales = (means + self.eps).rsqrt()
        normed = qkv[:, : len(self.weight)].float() * self.weight
        normed[:, : self.n_q] *= scales[:, :1]
        normed[:, self.n_q :] *= scales[:, 1:]
        return normed.to(qkv.dtype)

    def _parts(self) -> tuple[tuple[int, Tensor], ...]:
        """Returns, for queries and for keys, the index of the first element in a row and the weight
        of the norm."""
        return (0, self.weight[: self.n_q]), (self.n_q, self.weight[self.n_q :])


@dataclass(frozen=True, slots=True, kw_only=True)
class WideNormAttention(Attention):
    """Attention whose queries and keys are normalised across all heads before rotary embedding."""

    norms: WideNorms

    @classmethod
    def read_wide(
        cls,
        source: TensorSource,
        prefix: str,
        config: RotaryConfig,
        *,
        form: AttentionForm,
        has_bias: bool,
        rotary: int = 0,
    ) -> Self:
        """Reads all projections of attention and the norms `q_norm` and `k_norm` under `prefix`."""
        plain = Attention.read(
            source,
            prefix,
            config,
            form=form,
            qkv_bias=has_bias,
            output_bias=has_bias,
            rotary=rotary,
        )
        return cls.of(plain, norms=WideNorms.read(source, prefix, config))

    def describe_stored(self, to: Program, qkv: Buffer, layer: int) -> Buffer:
        self.norms.describe(to, qkv)
        return Attention.describe_stored(self, to, qkv, layer)


class Olmo2Stage(PostNormStage):
    """One stage of an OLMo 2 model."""

    config_type: ClassVar[type[ModelConfig]] = Olmo2Config
    config: Olmo2Config

    def read_attention(self, source: TensorSource, prefix: str, index: int) -> Attention:
        return WideNormAttention.read_wide(
            source,
            prefix,
            self.config,
            form=AttentionForm(window=self.config.layer_windows[index]),
            has_bias=self.config.attention_bias,
            rotary=self.rotary(index),
        )

    def rotary(self, index: int) -> int:
        """Returns the index of the rotary embedding that layer `index` uses. The default is 0, the
        only rotary embedding."""
        return 0
