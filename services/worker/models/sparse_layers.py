"""The fields by which Qwen's configurations say which layers have experts instead of one MLP."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.worker.models.config import PositiveInt


@dataclass(frozen=True, kw_only=True)
class SparseLayers:
    """Part of a configuration: every `sparse_step`-th layer has experts, except `dense_layers`."""

    sparse_step: PositiveInt = field(default=1, metadata={"alias": "decoder_sparse_step"})
    dense_layers: tuple[int, ...] = field(default=(), metadata={"alias": "mlp_only_layers"})

    def is_sparse(self, index: int) -> bool:
        """Returns whether layer `index` has experts instead of one MLP."""
        return index not in self.dense_layers and (index + 1) % self.sparse_step == 0
