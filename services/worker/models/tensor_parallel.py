"""The ranks that share a stage's layers: which rank holds which weights, and how results are
combined.

The division is Megatron's (Shoeybi et al., 2019): the first linear layer of attention and of an MLP
is divided by outputs, the second by inputs, so that attention and MLP each end with one sum over
the ranks. Embedding and head are divided by vocabulary. Process groups are made anew when a stage
was lost, but weights stay in memory. So weights are divided by `tp_rank` and `tp_size` alone, and
the collectives are passed to each forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

from torch import Tensor

from services.worker.models.config import ModelConfig, UnsupportedModel


class TensorParallel(Protocol):
    """The place of this rank in its stage, and the two collective operations that layers need."""

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""

    @property
    def size(self) -> int:
        """The number of ranks that share each layer."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums `tensor` over all ranks, in place."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Returns the tensors of all ranks, concatenated along the last dimension in the order of
        the ranks."""


class _Single:
    """The collectives of a stage with one rank, which need no communication."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor) -> None:
        """Does nothing: there is only one rank."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Returns `tensor` itself."""
        return tensor


SINGLE: TensorParallel = _Single()


def even_share(n: int, tp_rank: int, tp_size: int, *, what: str) -> range:
    """Divides `n` items equally among the ranks, and returns this rank's range.

    Raises UnsupportedModel if `tp_size` does not divide `n`; the message begins with `what`.
    """
    if n % tp_size:
        raise UnsupportedModel(f"{what}: {n} cannot be divided among tp_size {tp_size} ranks")
    size = n // tp_size
    return range(tp_rank * size, (tp_rank + 1) * size)


def vocab_share(vocab_size: int, tp_rank: int, tp_size: int) -> range:
    """Returns the range of token ids that a rank holds.

    All ranks but the last ones have `ceil(vocab_size / tp_size)` tokens. If the vocabulary cannot
    be divided equally, the last ranks have fewer tokens or none.
    """
    size = -(-vocab_size // tp_size)
    return range(min(tp_rank * size, vocab_size), min((tp_rank + 1) * size, vocab_size))


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The heads of one rank, as index ranges among the model's heads.

    If there are fewer K/V heads than ranks, several ranks hold a copy of one K/V head: the head
    that their query heads use.
    """

    q: range
    kv: range

    @classmethod
    def of(cls, config: ModelConfig, tp_rank: int, tp_size: int) -> Self:
        """Returns a rank's heads. Raises UnsupportedModel if the heads cannot be divided equally
        among the ranks."""
        q = even_share(config.n_heads, tp_rank, tp_size, what="num_attention_heads")
        n_kv = config.n_kv_heads
        if tp_size <= n_kv:
            return cls(q, even_share(n_kv, tp_rank, tp_size, what="num_key_value_heads"))
        if tp_size % n_kv:
            raise UnsupportedModel(
                f"num_key_value_heads: {n_kv} neither divides nor is divided by tp_size {tp_size}"
            )
        head = tp_rank * n_kv // tp_size
        return cls(q, range(head, head + 1))

    def q_elements(self, config: ModelConfig) -> range:
        """Returns the range of outputs of the query projection that belong to this rank's heads."""
        return range(self.q.start * config.head_dim, self.q.stop * config.head_dim)

    def kv_elements(self, config: ModelConfig) -> range:
        """Returns the range of outputs that belong to this rank's heads. The range is valid for the
        key projection and for the value projection."""
        return range(self.kv.start * config.head_dim, self.kv.stop * config.head_dim)


def check_rank(tp_rank: int, tp_size: int) -> None:
    """Raises UnsupportedModel unless `tp_rank` is below `tp_size`."""
    if not 0 <= tp_rank < tp_size:
        raise UnsupportedModel(f"tp_rank {tp_rank} is not below tp_size {tp_size}")
