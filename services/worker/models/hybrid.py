"""The token mixers of hybrid models. Most layers keep a state for each request, and the others use
attention.

Layers with a state are `GatedDeltaNet` (`Ops.delta_net`). Layers with attention are
`GatedAttention`, whose output is multiplied by gates. Each layer has storage either for states, or
for keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from kernels import AttentionForm, DeltaNetForm, HeadNorms
from kernels.program import Program
from kernels.steps import Buffer, Heads
from services.worker.models.config import ModelConfig, StateSizes
from services.worker.models.layers import ColumnParallelLinear, RowParallelLinear
from services.worker.models.tensor_parallel import HeadShare, even_share
from services.worker.models.weights import Part, Shard, TensorSource


@dataclass(frozen=True, slots=True)
class DeltaNetShape:
    """The heads of a Gated DeltaNet layer, on all ranks together.

    Consecutive value heads share a key head. Key heads are divided among the ranks, and a value
    head belongs to the same rank as its key head.
    """

    n_key_heads: int
    n_value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int

    @property
    def n_keys(self) -> int:
        """Number of elements of a token's keys, which is also the number of elements of its
        queries."""
        return self.n_key_heads * self.key_dim

    @property
    def n_values(self) -> int:
        """Number of elements of a token's values."""
        return self.n_value_heads * self.value_dim

    @property
    def n_channels(self) -> int:
        """Number of elements of a token's queries, keys and values together."""
        return 2 * self.n_keys + self.n_values

    @property
    def group_size(self) -> int:
        """Number of value heads that share a key head."""
        return self.n_value_heads // self.n_key_heads

    @property
    def states(self) -> StateSizes:
        """The sizes of the state that the layer keeps for each request."""
        return StateSizes(
            self.n_value_heads, self.key_dim, self.value_dim, self.kernel_size - 1, self.n_channels
        )


@dataclass(frozen=True, slots=True)
class DeltaNetShare:
    """One rank's part of a Gated DeltaNet layer: some key heads, and the value heads that share
    them."""

    shape: DeltaNetShape
    key_heads: range

    @classmethod
    def of(cls, shape: DeltaNetShape, source: TensorSource) -> Self:
        """Returns a rank's part of the heads. Raises UnsupportedModel if the heads cannot be
        divided equally among the ranks."""
        n_heads, what = shape.n_key_heads, "linear_num_key_heads"
        return cls(shape, even_share(n_heads, source.tp_rank, source.tp_size, what=what))

    def scaled(self, size: int, first: int = 0) -> range:
        """Returns the range of this rank's elements in a tensor that holds `size` elements per key
        head and begins at `first`."""
        return range(first + self.key_heads.start * size, first + self.key_heads.stop * size)

    @property
    def value_heads(self) -> range:
        return self.scaled(self.shape.group_size)

    @property
    def values(self) -> range:
        """The range of this rank's elements among the values of all ranks."""
        return self.scaled(self.shape.group_size * self.shape.value_dim)

    @property
    def channels(self) -> tuple[range, range, range]:
        """The ranges of this rank's queries, keys and values in a row that contains the queries,
        keys and values of all ranks."""
        n_keys, key_dim = self.shape.n_keys, self.shape.key_dim
        values = self.scaled(self.shape.group_size * self.shape.value_dim, 2 * n_keys)
        return self.scaled(key_dim), self.scaled(key_dim, n_keys), values


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """This rank's share of a Gated DeltaNet layer (Yang et al., 2025)."""

    inputs: ColumnParallelLinear  # projects to a token's queries, keys, values, z, b and a
    output: RowParallelLinear
    form: DeltaNetForm

    @classmethod
    def read(
        cls,
        source: TensorSource,
        prefix: str,
        inputs: ColumnParallelLinear,
        share: DeltaNetShare,
        *,
        hidden_size: int,
        eps: float,
    ) -> Self:
        """Reads the tensors under `prefix`, except the projection `inputs`, which each family
        stores in a different form."""
        shape, name = share.shape, f"{prefix}.conv1d.weight"
        stored = (shape.n_channels, 1, shape.kernel_size)
        conv = source.joined([Part(name, stored, Shard(0, span)) for span in share.channels])

        def of_heads(name: str) -> Tensor:
            shard = Shard(0, share.value_heads)
            return source.tensor(f"{prefix}.{name}", shape.n_value_heads, shard=shard).float()

        form = DeltaNetForm(
            n_key_heads=len(share.key_heads),
            n_value_heads=len(share.value_heads),
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            conv=conv[:, 0].t().float().contiguous(),
            decay_rate=-of_heads("A_log").exp(),
            step_bias=of_heads("dt_bias"),
            norm=source.tensor(f"{prefix}.norm.weight", shape.value_dim).float(),
            eps=eps,
        )
        output = RowParallelLinear.read(
            source,
            f"{prefix}.out_proj",
            n_in=shape.n_values,
            n_out=hidden_size,
            share=share.values,
            has_bias=False,
        )
        return cls(inputs, output, form)

    def describe(
        self, to: Program, x: Buffer, layer: int, residual: Buffer | None = None
    ) -> Buffer:
        """Adds the steps to a program, as `Mixer.describe` specifies."""
        mixed = to.delta_net(self.inputs.describe(to, x), self.form, layer=layer)
        return self.output.describe(to, mixed, residual)


@dataclass(frozen=True, slots=True)
class GatedAttention:
    """This rank's share of attention. The outputs of attention are multiplied by the sigmoid of
    gates.

    The projection of queries also computes the gates.
    """

    inputs: ColumnParallelLinear  # projects to a token's queries, keys, values and gates
    output: RowParallelLinear
    n_heads: int
    head_dim: int
    n_attended: int  # outputs of `inputs` that are queries, keys or values
    head_norms: HeadNorms

    @classmethod
    def read(
        cls,
        source: TensorSource,
        prefix: str,
        config: ModelConfig,
        *,
        order: Sequence[int],
        has_bias: bool,
        head_norms: HeadNorms,
    ) -> Self:
        """Reads `q_proj`, `k_proj`, `v_proj` and `o_proj` under `prefix`.

        The rows of `q_proj` are, for each head, the queries and then the gates. `order` gives, for
        each element of a query or key head, the index at which the element is stored (see
        `rope.head_order`).
        """
        heads = HeadShare.of(config, source.tp_rank, source.tp_size)
        head_dim, hidden_size = config.head_dim, config.hidden_size
        q, kv = heads.q_elements(config), heads.kv_elements(config)
        n_q, n_kv = config.n_heads * head_dim, config.n_kv_heads * head_dim
        inputs = ColumnParallelLinear.read(
            source,
            [f"{prefix}.{name}_proj" for name in "qkv"],
            n_in=hidden_size,
            n_out=(2 * n_q, n_kv, n_kv),
            shares=(range(2 * q.start, 2 * q.stop), kv, kv),
            has_bias=has_bias,
            order=_gates_last(len(heads.q), len(heads.kv), torch.tensor(order)),
        )
        output = RowParallelLinear.read(
            source, f"{prefix}.o_proj", n_in=n_q, n_out=hidden_size, share=q, has_bias=has_bias
        )
        return cls(
            inputs=inputs,
            output=output,
            n_heads=len(heads.q),
            head_dim=head_dim,
            n_attended=len(q) + 2 * len(kv),
            head_norms=head_norms,
        )

    def describe(
        self, to: Program, x: Buffer, layer: int, residual: Buffer | None = None
    ) -> Buffer:
        """Adds the steps to a program, as `Mixer.describe` specifies."""
        projected = self.inputs.describe(to, x)
        qkv = to.take_part(projected, 0, self.n_attended)
        n_kv_heads = (self.n_attended // self.head_dim - self.n_heads) // 2
        heads = Heads(n_heads=self.n_heads, n_kv_heads=n_kv_heads, head_dim=self.head_dim)
        to.rotary_write_kv(qkv, heads, self.head_norms, rotary=0, layer=layer)
        attended = to.attend(qkv, heads, AttentionForm(), None, layer=layer)
        gated = to.sigmoid_and_mul(projected, attended, self.n_attended)
        return self.output.describe(to, gated, residual)


def _gates_last(n_heads: int, n_kv_heads: int, order: Tensor) -> Tensor:
    """Returns, for each output of this rank's queries, keys, values and gates, the index of its row
    among the rows that this rank reads.

    The elements of each query and key head are permuted by `order`. In the file the gates of each
    head follow the queries of the head.
    """
    head_dim = len(order)
    queries = 2 * head_dim * torch.arange(n_heads)[:, None]
    first_key = 2 * head_dim * n_heads
    keys = first_key + head_dim * torch.arange(n_kv_heads)[:, None]
    n_kv = n_kv_heads * head_dim
    return torch.cat(
        (
            (queries + order).flatten(),
            (keys + order).flatten(),
            torch.arange(first_key + n_kv, first_key + 2 * n_kv),
            (queries + head_dim + torch.arange(head_dim)).flatten(),
        )
    )
