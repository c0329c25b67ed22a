"""Which share of a model one rank computes: a range of layers, and a part of each layer."""

from __future__ import annotations

from dataclasses import dataclass

from kernels import Ops
from services.worker.models.config import UnsupportedModel


def layer_range(n_layers: int, stage_index: int, n_stages: int) -> range:
    """Returns the range of layers of a stage.

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
    """Which share of the model one rank computes, and the operations of its device."""

    layers: range
    is_first: bool
    is_last: bool
    ops: Ops
    tp_rank: int = 0
    tp_size: int = 1
    has_head: bool = True  # False: the last stage has no head for tokens
