"""What every model family offers the model runner: its share of one stage's computation.

A stage holds consecutive layers [first, last) of the model (the paper's inter-layer parallelism).
The first stage also embeds tokens, the last one also turns hidden states into logits. Ranks that
share a stage each hold a part of every layer (intra-layer parallelism) and compute together: each
calls the same methods with the same arguments and gets the same results. A family is one file that
implements `StageModel` and one line in the registry of `services.worker.models`.

Knows no requests, no plans and no K/V bookkeeping: only flat tensors and where to store what.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kernels import AttentionMetadata, Ops
from services.worker.models.config import ModelConfig, UnsupportedModel
from services.worker.models.tensor_parallel import SINGLE, TensorParallel

LayerKV = tuple[Tensor, Tensor]  # keys and values, [n_blocks, block_size, n_kv_heads, head_dim]


def layer_range(n_layers: int, stage_index: int, n_stages: int) -> range:
    """The layers of a stage: balanced, and earlier stages take what is left over.

    Earlier ones, because the last stage has the output projection on top of its layers.
    """
    if not 0 <= stage_index < n_stages:
        raise UnsupportedModel(f"stage_index {stage_index} is not below n_stages {n_stages}")
    if n_stages > n_layers:
        raise UnsupportedModel(f"{n_layers} layers cannot be divided among {n_stages} stages")
    size, n_larger = divmod(n_layers, n_stages)
    first = stage_index * size + min(stage_index, n_larger)
    return range(first, first + size + (stage_index < n_larger))


@dataclass(frozen=True, slots=True)
class StagePlace:
    """Where in the model a stage lies, whose part of it this is, and on what it computes."""

    layers: range
    is_first: bool
    is_last: bool
    ops: Ops
    tp_rank: int = 0
    tp_size: int = 1


class StageModel(ABC):
    """One stage's weights and what is computed with them."""

    config_type: ClassVar[type[ModelConfig]]  # how the family's config.json is read

    def __init__(
        self, config: ModelConfig, place: StagePlace, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self.layers = place.layers
        self.is_first = place.is_first
        self.is_last = place.is_last
        self.ops = place.ops
        self.tp_rank = place.tp_rank
        self.tp_size = place.tp_size
        self.dtype = dtype  # of hidden states and K/V
        self.device = device
        # The different windows of these layers, each of which attention is planned for.
        self.windows = tuple({config.layer_windows[i]: None for i in place.layers})

    @property
    def first_layer(self) -> int:
        """Index of this stage's first layer in the model."""
        return self.layers.start

    @property
    def n_layers(self) -> int:
        """Layers on this stage."""
        return len(self.layers)

    @property
    def hidden_size(self) -> int:
        """Size of what travels between stages, [n_tokens, hidden_size] of `dtype`."""
        return self.config.hidden_size

    @abstractmethod
    def embed(self, token_ids: Tensor, ranks: TensorParallel = SINGLE) -> Tensor:
        """Tokens [n_tokens] as hidden states [n_tokens, hidden_size]; first stage only."""

    @abstractmethod
    def forward(
        self,
        hidden: Tensor,
        *,
        positions: Tensor,
        slots: Tensor,
        attention: AttentionMetadata,
        kv: Sequence[LayerKV],
        ranks: TensorParallel = SINGLE,
        sampled_tokens: Tensor | None = None,
    ) -> Tensor:
        """Runs this stage's layers over a flat batch, storing its keys and values in `kv`.

        `hidden` [n_tokens, hidden_size] is used up, and the result is of the same shape;
        `positions` and `slots` are [n_tokens]; `kv` has one entry per layer of the stage. With
        `sampled_tokens` [n_sampled], places in the batch in order, the result is what `logits`
        makes of theirs.
        """

    @abstractmethod
    def logits(self, hidden: Tensor, ranks: TensorParallel = SINGLE) -> Tensor:
        """Logits [n, vocab_size] of hidden states [n, hidden_size]; last stage only.

        In the model's element type, or in float32 where a family computes more than a product.
        """
