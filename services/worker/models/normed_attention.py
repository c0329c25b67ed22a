"""Attention of Gemma 3n and 4, whose queries, keys and values are normalised head by head.

There are three kinds of layers. The first kind projects queries, keys and values. The second kind
projects queries and keys, and uses a copy of the projected keys as values. The third kind projects
only queries, which attend to the keys and values that an earlier layer of the same stage has
stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from kernels import AttentionForm
from kernels.program import Program
from kernels.steps import Buffer
from services.worker.models.config import ModelConfig
from services.worker.models.decoder_layers import Attention
from services.worker.models.layers import RMSNorm
from services.worker.models.weights import TensorSource

Projected = Literal["q", "qk", "qkv"]


@dataclass(frozen=True, slots=True)
class KVNorms:
    """The norms of the keys and values, in a layer that stores them."""

    k: RMSNorm
    v: RMSNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class NormedAttention(Attention):
    """This rank's share of the attention of a layer. If `kv_norms` is None, the layer stores no
    keys and values, and attends to the keys and values of an earlier layer."""

    rotary: int
    q_norm: RMSNorm
    kv_norms: KVNorms | None

    @classmethod
    def read_normed(
        cls,
        source: TensorSource,
        prefix: str,
        config: ModelConfig,
        *,
        projected: Projected,
        form: AttentionForm,
        rotary: int,
        has_bias: bool,
        q_norm: RMSNorm,
        kv_norms: KVNorms | None,
    ) -> Self:
        """Reads the projections named by `projected`, and the output projection, under `prefix`.

        `config` must have the number and size of the heads of this layer, which may differ between
        layers.
        """
        plain = Attention.read(
            source,
            prefix,
            config,
            form=form,
            qkv_bias=has_bias,
            output_bias=has_bias,
            projected=projected,
            rotary=rotary,
        )
        return cls.of(plain, q_norm=q_norm, kv_norms=kv_norms)

    def describe_stored(self, to: Program, qkv: Buffer, layer: int) -> Buffer:
        if self.kv_norms is None:
            self.q_norm.describe_parts(to, qkv, 0, self.n_heads)
            to.turn_heads(qkv, qkv, n_heads=self.n_heads, rotary=self.rotary, size=self.head_dim)
            return qkv
        qkv = self._with_values(to, qkv)
        first_key = self.n_heads * self.head_dim
        first_value = first_key + self.n_kv_heads * self.head_dim
        self.q_norm.describe_parts(to, qkv, 0, self.n_heads)
        self.kv_norms.k.describe_parts(to, qkv, first_key, self.n_kv_heads)
        self.kv_norms.v.describe_parts(to, qkv, first_value, self.n_kv_heads)
        to.rotary_write_kv(qkv, self.heads, None, rotary=self.rotary, layer=layer)
        return qkv

    def _with_values(self, to: Program, qkv: Buffer) -> Buffer:
        """Returns rows of queries, keys and values: `qkv` itself if the layer projects values.
        Otherwise adds steps to a program that copy `qkv` and append a copy of its keys as values.
        """
        n_keys = self.n_kv_heads * self.head_dim
        first_key = self.n_heads * self.head_dim
        if qkv.width > first_key + n_keys:
            return qkv
        out = to.buffer(qkv.width + n_keys)
        to.copy_part(qkv, 0, qkv.width, out, 0)
        to.copy_part(qkv, first_key, n_keys, out, qkv.width)
        return out


def sources_of(windows: Sequence[int | None], n_shared: int) -> Sequence[int]:
    """Returns, for each layer, the index of the layer whose keys and values it attends to.

    Each of the last `n_shared` layers attends to the last earlier layer that stores keys and is of
    the same kind: with a window or without a window. All other layers attend to their own keys.
    Raises ValueError if there is no such earlier layer.
    """
    n_own = len(windows) - n_shared
    last_of_kind = {windows[i] is None: i for i in range(n_own)}
    if not {window is None for window in windows} <= last_of_kind.keys():
        raise ValueError(
            f"num_kv_shared_layers ({n_shared}) leaves shared layers none of their type before them"
        )
    return (*range(n_own), *(last_of_kind[window is None] for window in windows[n_own:]))
