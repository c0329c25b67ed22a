"""Determines which share of a model one rank computes: a range of layers, and a part of each
layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from kernels import Ops
from services.common.pooling import Pooling
from services.worker.models.config import ModelConfig, UnsupportedModel


def layer_range(n_layers: int, stage_index: int, n_stages: int) -> range:
    """Returns the range of layers of a stage. Raises UnsupportedModel if there is no such stage, or
    if there are more stages than layers.

    If the stages cannot have equally many layers, earlier stages have one more. The last stage
    never gets the additional layer, because it also computes the output projection.
    """
    if not 0 <= stage_index < n_stages:
        raise UnsupportedModel(f"stage_index {stage_index} is not below n_stages {n_stages}")
    if n_stages > n_layers:
        raise UnsupportedModel(
            f"n_stages: {n_layers} layers cannot be divided among {n_stages} stages"
        )
    size, n_larger = divmod(n_layers, n_stages)
    first = stage_index * size + min(stage_index, n_larger)
    return range(first, first + size + (stage_index < n_larger))


@dataclass(frozen=True, slots=True)
class StagePlace:
    """The share of the model that one rank computes, and the operations of the rank's device."""

    layers: range
    is_first: bool
    is_last: bool
    ops: Ops
    tp_rank: int = 0
    tp_size: int = 1
    has_head: bool = True  # False: the last stage has no head for tokens

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        layers: range,
        pooling: Pooling | None,
        *,
        ops: Ops,
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> Self:
        """Returns the share of the rank `tp_rank` of the stage that has `layers`. `pooling` says
        how the model makes vectors (embeddings or scores), and whether it also generates tokens."""
        return cls(
            layers=layers,
            is_first=layers.start == 0,
            is_last=layers.stop == config.n_layers,
            ops=ops,
            tp_rank=tp_rank,
            tp_size=tp_size,
            has_head=pooling is None or pooling.generates,
        )
