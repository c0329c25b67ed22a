"""The tensors that the steps of one run of a program read and write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from kernels.forms.adapter_rows import AdapterRows, BatchAdapters
from kernels.forms.state_spans import StateSpans
from kernels.ops import LayerKV, Ops, ProgramBatch, Ranks
from kernels.program import Program

NOTHING = torch.empty(0)
"""Placeholder for the rows of a buffer before the buffer's first step and after its last step."""


@dataclass(slots=True)
class Frame:
    """All values of one run of a program: the rows of every buffer, and the arguments of the
    run."""

    program: Program
    ops: Ops
    ranks: Ranks
    rows: list[Tensor]  # rows [n, width] of each buffer, by the buffer's index
    inputs: Tensor = NOTHING  # tokens [n_tokens], or received hidden states
    positions: Tensor = NOTHING  # [n_tokens]
    sampled: Tensor = NOTHING  # [n_sampled], indices of the sampled tokens in the batch
    groups: Sequence[ProgramBatch] = ()  # the batch with the slots and plan of each K/V group
    kv: Sequence[LayerKV] = ()
    states: StateSpans | None = None
    adapters: BatchAdapters | None = None  # of a program with adapters

    @classmethod
    def of_head(
        cls, program: Program, ops: Ops, ranks: Ranks, adapters: AdapterRows | None = None
    ) -> Self:
        """Returns the frame for a run of the head alone, which computes logits from hidden states.
        `adapters` are the adapters of the rows of these hidden states."""
        rows = [NOTHING] * len(program.buffers)
        of_batch = None if adapters is None else BatchAdapters(adapters, adapters)
        return cls(program, ops, ranks, rows, adapters=of_batch)

    @classmethod
    def of(
        cls,
        program: Program,
        ops: Ops,
        inputs: Tensor,
        batch: ProgramBatch,
        kv: Sequence[LayerKV],
        sampled: Tensor = NOTHING,
    ) -> Self:
        """Returns the frame for a run of the whole program. `ProgramRunner.logits` describes the
        arguments."""
        rows = [NOTHING] * len(program.buffers)
        if program.inputs is not None:
            rows[program.inputs.index] = inputs
        return cls(
            program,
            ops,
            batch.ranks,
            rows,
            inputs,
            batch.positions,
            sampled,
            batch.of_groups(),
            kv,
            batch.states,
            batch.adapters if program.has_adapters else None,
        )

    def group(self, layer: int) -> ProgramBatch:
        """Returns the batch with the slots and the attention plan for the K/V group of `layer`."""
        return self.groups[self.program.group_of(layer)]


def in_heads(rows: Tensor, n_heads: int) -> Tensor:
    """Returns a view of `rows` [n, width] as [n, n_heads, width / n_heads]."""
    n, width = rows.shape
    return rows.view(n, n_heads, width // n_heads)
