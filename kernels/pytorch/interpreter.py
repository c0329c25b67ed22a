"""Runs a program one step after the other, with the operations (`Ops`) of any implementation. Each
buffer is a tensor.

The interpreter runs programs on a GPU, on a CPU without the native library, and with matrices or
element types that the library does not support. Tests check that the native library's results are
bit-identical. The functions of the steps are in `step_functions.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kernels.forms.adapter_rows import AdapterRows
from kernels.forms.logits import Logits
from kernels.ops import LayerKV, Ops, ProgramBatch, Ranks
from kernels.program import Program
from kernels.pytorch.frame import NOTHING, Frame
from kernels.pytorch.row_parts import joined
from kernels.pytorch.step_functions import Run, function_of
from kernels.steps import (
    Buffer,
    buffers_of,
)


class Interpreter:
    """Runs a program step by step with the operations (`Ops`) of any implementation. Implements
    `kernels.ops.ProgramRunner`."""

    def __init__(self, program: Program, ops: Ops) -> None:
        """Looks up the functions of all steps of `program`. `ops` has the operations that these
        functions call. Raises TypeError for a step that has no function."""
        self.program = program
        self._ops = ops
        n_hidden = program.n_hidden_steps
        layers, head = (
            list(joined(program.steps[:n_hidden])),
            list(joined(program.steps[n_hidden:])),
        )
        steps = [*layers, *head]
        ends = _ends(steps, program)
        compiled = [(function_of(step), step, dead) for step, dead in zip(steps, ends, strict=True)]
        self._layers, self._head = compiled[: len(layers)], compiled[len(layers) :]

    def __call__(self, inputs: Tensor, batch: ProgramBatch, kv: Sequence[LayerKV]) -> Tensor:
        """Runs the program up to the hidden states, as `ProgramRunner.__call__` describes."""
        at = Frame.of(self.program, self._ops, inputs, batch, kv)
        _run(self._layers, at)
        return at.rows[given(self.program.hidden).index]

    def logits(
        self, inputs: Tensor, batch: ProgramBatch, kv: Sequence[LayerKV], sampled: Tensor
    ) -> Logits:
        """Runs the whole program and returns logits, as `ProgramRunner.logits` describes."""
        logits = given(self.program.logits)
        at = Frame.of(self.program, self._ops, inputs, batch, kv, sampled)
        _run(self._layers, at)
        _run(self._head, at)
        return Logits(at.rows[logits.index])

    def head(self, hidden: Tensor, ranks: Ranks, adapters: AdapterRows | None = None) -> Tensor:
        """Computes the logits of hidden states, as `ProgramRunner.head` describes."""
        logits = given(self.program.logits)
        at = Frame.of_head(self.program, self._ops, ranks, adapters)
        at.rows[given(self.program.selected).index] = hidden
        _run(self._head[1:], at)  # without the first step, which selects the sampled tokens
        return at.rows[logits.index]


_Compiled = tuple[Run, object, tuple[int, ...]]
"""The function of a step, the step itself, and the indices of buffers that no later step uses."""


def _run(steps: Sequence[_Compiled], at: Frame) -> None:
    rows = at.rows
    for function, step, dead in steps:
        function(step, at)
        for index in dead:
            rows[index] = NOTHING


def _ends(steps: Sequence[object], program: Program) -> list[tuple[int, ...]]:
    """Returns, for each step, the indices of the buffers that no later step uses."""
    last = {buffer.index: i for i, step in enumerate(steps) for buffer in buffers_of(step)}
    for kept in (program.hidden, program.logits):
        if kept is not None:
            last.pop(kept.index, None)
    dead: list[list[int]] = [[] for _ in steps]
    for index, i in last.items():
        dead[i].append(index)
    return [tuple(each) for each in dead]


def given(buffer: Buffer | None) -> Buffer:
    """Returns `buffer`. Raises ValueError if it is None, which means that the program is
    incomplete."""
    if buffer is None:
        raise ValueError(
            "the program has no such end: its layers have not ended, or it has no head"
        )
    return buffer
