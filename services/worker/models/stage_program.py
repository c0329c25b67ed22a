"""Joins the embedding, layers and head of a stage into one program, from tokens to logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.forms.rotary_angles import RotaryAngles
from kernels.program import Program
from services.worker.models.decoder_layers import Embedding, Head, Layer


@dataclass(frozen=True, slots=True)
class StagePieces:
    """The embedding, layers and head of a stage, on one of the ranks that share the stage."""

    embedding: Embedding | None  # None on all stages but the first one
    rotaries: Sequence[RotaryAngles]  # one of each kind
    layers: Sequence[Layer]
    head: Head | None  # None on all stages but the last one
    hidden_size: int  # of hidden states between stages
    groups: Sequence[int] = ()  # the K/V group of each layer; empty: there is one group

    def program(self, dtype: torch.dtype, tp_size: int = 1) -> Program:
        """Returns the program of the stage. Hidden states have the type `dtype`, and `tp_size`
        ranks share the stage."""
        to = Program(dtype, self.rotaries, self.groups, tp_size=tp_size)
        if self.embedding is None:
            hidden = to.take_in(self.hidden_size)
        else:
            hidden = self.embedding.describe(to)
        for i, layer in enumerate(self.layers):
            hidden = layer.describe(to, hidden, i)
        to.end_layers(hidden)
        if self.head is not None:
            to.end_head(self.head.describe(to, to.select(hidden)))
        return to
