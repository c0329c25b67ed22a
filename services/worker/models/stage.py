"""The computation of one stage, as every model family offers it to the model runner.

A stage holds consecutive layers [first, last) of the model (the paper's inter-layer parallelism).
The first stage also embeds tokens, and the last stage also turns hidden states into logits. Ranks
that share a stage each hold a part of every layer (intra-layer parallelism) and compute together:
all ranks call the same methods with equal arguments and get equal results. A family is one file
with a subclass of `StageModel` and one line in the registry of `services.worker.models`. The
subclass reads weights and describes the stage as a `kernels.program.Program`, which the device's
operations run.

This module does not depend on requests, plans or the bookkeeping of K/V blocks. It handles flat
tensors and the places where keys and values are stored.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from kernels import AttentionPlan, StateSpans
from kernels.forms.adapter_rows import AdapterRows, BatchAdapters
from kernels.forms.logits import Logits
from kernels.ops import LayerKV, ProgramRunner
from services.worker.models.adapters.adaptable_program import AdaptableProgram, FittedAdapter
from services.worker.models.config import ModelConfig, UnsupportedModel
from services.worker.models.kv_groups import KVGroups
from services.worker.models.pooler import Pooler
from services.worker.models.stage_place import StagePlace
from services.worker.models.tensor_parallel import SINGLE, TensorParallel


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Says where the layers of one K/V group store the keys and values of a batch, and how they
    attend."""

    slots: Tensor  # [n_tokens] int64
    attention: AttentionPlan


@dataclass(frozen=True, slots=True)
class StageBatch:
    """Positions, K/V slots and attention plan of a flat batch, without tokens or hidden states."""

    positions: Tensor  # [n_tokens] int64, of tokens in their sequences
    slots: Tensor  # [n_tokens] int64, where their keys and values are stored
    attention: AttentionPlan
    ranks: TensorParallel = SINGLE  # the ranks that share the stage
    states: StateSpans | None = None  # where layers keep the states of requests
    adapters: BatchAdapters | None = None  # None: no token has an adapter
    # Plans of the K/V groups, which replace `slots` and `attention`. Empty: there is one group.
    groups: Sequence[GroupPlan] = ()

    def of_groups(self) -> list[StageBatch]:
        """Returns a batch for each K/V group, with the group's slots and attention plan."""
        if len(self.groups) < 2:
            return [self]
        return [
            replace(self, slots=group.slots, attention=group.attention) for group in self.groups
        ]


class StageModel:
    """One rank's share of the weights of a stage, and the computations that use these weights."""

    config_type: ClassVar[type[ModelConfig]]  # how the family's config.json is read

    adaptable: AdaptableProgram | None = None
    """The program of the stage, to which adapters can be added; None if the model was loaded for
    no adapters."""
    fitted: Sequence[FittedAdapter] = ()
    """This rank's shares of the adapters that are in the program."""
    runner: ProgramRunner
    """Runs the program of the stage. It is assigned after the weights have been read."""
    pooler: Pooler | None = None
    """Makes vectors (embeddings or scores) of hidden states. None if this stage makes none."""

    def __init__(
        self, config: ModelConfig, place: StagePlace, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raises UnsupportedModel if a layer needs the keys and values of a layer on another
        stage."""
        for i in place.layers:
            if config.kv_sources[i] not in place.layers:
                raise UnsupportedModel(
                    f"num_kv_shared_layers: layer {i} attends to keys and values of layer "
                    f"{config.kv_sources[i]}, which is on an earlier stage; choose another n_stages"
                )
        self.config = config
        self.layers = place.layers
        self.is_first = place.is_first
        self.is_last = place.is_last
        self.has_head = place.is_last and place.has_head
        self.ops = place.ops
        self.tp_rank = place.tp_rank
        self.tp_size = place.tp_size
        self.dtype = dtype  # of hidden states and K/V
        self.device = device
        self.kv_groups = KVGroups.of(config)

    def with_adapters(self, fitted: Sequence[FittedAdapter]) -> Self:
        """Returns a stage with the same weights, and with the adapters `fitted` instead of its
        present ones. Raises RuntimeError if the model was loaded for no adapters."""
        if self.adaptable is None:
            raise RuntimeError("the model was loaded for no adapters")
        made = copy.copy(self)
        made.fitted = tuple(fitted)
        made.runner = self.ops.runner(self.adaptable.with_adapters(fitted))
        return made

    @property
    def first_layer(self) -> int:
        """The index of this stage's first layer in the model."""
        return self.layers.start

    @property
    def n_layers(self) -> int:
        """The number of layers on this stage."""
        return len(self.layers)

    @property
    def hidden_size(self) -> int:
        """Number of elements of a token's row of hidden states, which stages send in `dtype`."""
        return self.config.hidden_size

    def forward(self, inputs: Tensor, batch: StageBatch, kv: Sequence[LayerKV]) -> Tensor:
        """Returns the hidden states after this stage's last layer, [n_tokens, hidden_size].

        `inputs` are the tokens [n_tokens] on the first stage. On other stages `inputs` are the
        hidden states [n_tokens, hidden_size] of the previous stage, and may be overwritten. Keys
        and values are stored in `kv`, which has an entry for each layer.
        """
        return self.runner(inputs, batch, kv)

    def sampled_logits(
        self, inputs: Tensor, batch: StageBatch, kv: Sequence[LayerKV], sampled_tokens: Tensor
    ) -> Logits:
        """Returns the logits of sampled tokens, [n_sampled, vocab_size].

        `sampled_tokens` [n_sampled] are the ascending indices in the batch of the tokens after
        which a token is sampled. `forward` describes the other arguments. The next call may
        overwrite the result. Raises RuntimeError on a stage without a head.
        """
        self._check_has_head()
        return self.runner.logits(inputs, batch, kv, sampled_tokens)

    def logits(
        self, hidden: Tensor, ranks: TensorParallel = SINGLE, adapters: AdapterRows | None = None
    ) -> Tensor:
        """Returns the logits [n, vocab_size] of hidden states [n, hidden_size] after all layers.
        `adapters` are the adapters of the rows of `hidden`, or None if no row has one. The logits
        are in the model's element type, or in float32 for families whose head caps logits. Raises
        RuntimeError on a stage without a head."""
        self._check_has_head()
        return self.runner.head(hidden, ranks, adapters)

    def _check_has_head(self) -> None:
        if not self.has_head:
            raise RuntimeError("only the last stage of a model that generates has logits")
