"""Runs programs with the native library: one call for each series of steps that it can run.

The library computes the operations that the interpreter would call, in equal order, so results are
bit-identical. Calls of many steps save the time that Python takes between operations
(`docs/performance.md` has measurements). The functions of `kernels.pytorch.step_functions` run all
other steps, on tensors that share the memory of the library's buffers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from kernels.forms.adapter_rows import AdapterRows
from kernels.forms.logits import Logits
from kernels.forms.rotary_angles import Angles, RotaryAngles
from kernels.native.buffers import Buffers
from kernels.native.call import declare
from kernels.native.checks import check, is_native
from kernels.native.fill import step_of
from kernels.native.storage import LayerStorage, int64_address
from kernels.native.structs import (
    AdapterRowsStruct,
    AnglesStruct,
    BatchStruct,
    Seconds,
    StepStruct,
)
from kernels.ops import LayerKV, Ops, ProgramBatch, ProgramRunner, Ranks
from kernels.program import Program
from kernels.pytorch.frame import Frame
from kernels.pytorch.interpreter import Interpreter, given
from kernels.pytorch.step_functions import function_of
from kernels.steps import (
    STEPS,
    AddLowRank,
    AddPositions,
    Buffer,
    Embed,
    EmbedPacked,
    Greedy,
    LookUpAngles,
    ScaleByPosition,
    buffers_of,
)
from kernels.weights.linear import PanelTable

_NO_LIMIT = 2**63 - 1


def run_program(library: ctypes.CDLL, program: Program, ops: Ops, /) -> ProgramRunner:
    """Returns the fastest runner of a program: a `NativeProgram` if the library can run the
    program, otherwise the interpreter. `kernels.ops.RunProgram` describes the errors."""
    if is_native(program):
        return NativeProgram(library, program, ops)
    return Interpreter(program, ops)


class NativeProgram:
    """A program that the native library runs; implements `kernels.ops.ProgramRunner`."""

    def __init__(self, library: ctypes.CDLL, program: Program, ops: Ops) -> None:
        """Takes the addresses of the tensors of a program, and keeps the tensors alive. `is_native`
        must be true for the program.

        Raises ValueError for tensors that do not fit each other, and TypeError for a step that
        neither the library nor the interpreter can run.
        """
        check(program)
        self.program = program
        self.seconds = Seconds()
        """Seconds that the library's operations have taken in all runs, for each kind of
        operation."""
        self._ops = ops
        self._run = declare(library, "layers", "steps n_steps batch seconds")
        self._n_wrong = declare(library, "layers_n_wrong", "batch")
        self._kept: list[object] = []
        steps, n_hidden = program.steps, program.n_hidden_steps
        head = steps[n_hidden:]
        if program.logits is not None:
            head = [*head, Greedy(program.logits)]
        self._layers = self._segments(steps[:n_hidden])
        self._whole = self._segments([*steps[:n_hidden], *head])
        self._head = self._segments(head[1:])  # without the first step, which selects rows
        self._buffers = Buffers(program)
        self._storage = LayerStorage(program)
        self._angles = _AnglesAddresses(program)
        self._max_ids = min(
            (_n_rows(s) for s in steps if isinstance(s, _TABLES)), default=_NO_LIMIT
        )
        self._max_positions = min(
            (_n_positions(s) for s in steps if isinstance(s, _POSITIONED)), default=_NO_LIMIT
        )
        self._argmax = _Argmax(0)
        self._n_adapters = max(map(_n_adapters, steps), default=0)

    def __call__(self, inputs: Tensor, batch: ProgramBatch, kv: Sequence[LayerKV]) -> Tensor:
        """Runs the program up to the hidden states, as `ProgramRunner.__call__` describes. If the
        method raises IndexError, nothing was computed."""
        self._compute(self._layers, inputs, batch, kv, None)
        hidden = given(self.program.hidden)
        # A copy, since these hidden states may still be sent while the next batch runs.
        return self._buffers.tensor(hidden, inputs.shape[0]).clone()

    def logits(
        self, inputs: Tensor, batch: ProgramBatch, kv: Sequence[LayerKV], sampled: Tensor
    ) -> Logits:
        """Runs the whole program and returns logits, as `ProgramRunner.logits` describes. If the
        method raises IndexError, nothing was computed."""
        n_sampled = sampled.shape[0]
        self._set_n_sampled(n_sampled)
        self._compute(self._whole if n_sampled else self._layers, inputs, batch, kv, sampled)
        logits = self._buffers.tensor(given(self.program.logits), n_sampled)
        return Logits(logits, self._argmax.values)

    def head(self, hidden: Tensor, ranks: Ranks, adapters: AdapterRows | None = None) -> Tensor:
        """Computes the logits of hidden states, as `ProgramRunner.head` describes."""
        n = hidden.shape[0]
        logits = given(self.program.logits)
        self._set_n_sampled(n)
        batch = BatchStruct(
            buffers=self._buffers.address(0, n),
            n_sampled=n,
            argmax=self._argmax.address,
            sampled_adapters=self._adapter_rows(adapters, n),
        )
        self._buffers.tensor(given(self.program.selected), n).copy_(hidden)
        if n:
            frame = Frame.of_head(self.program, self._ops, ranks, adapters)
            self._run_segments(self._head, batch, frame)
        # A copy, since the method may be called again while these logits are in use.
        return self._buffers.tensor(logits, n).clone()

    def _segments(self, steps: Sequence[object]) -> list[_Segment]:
        """Splits steps into segments. A segment ends with a step that the library cannot run, or
        with the last of all steps."""
        segments: list[_Segment] = []
        native: list[StepStruct] = []
        for step in steps:
            if _is_of_library(step):
                native.append(step_of(step, self._kept))
            else:
                segments.append(_Segment(native, step))
                native = []
        return [*segments, _Segment(native, None)]

    def _set_n_sampled(self, n: int) -> None:
        if self._argmax.n != n:
            self._argmax = _Argmax(n)

    def _compute(
        self,
        segments: Sequence[_Segment],
        inputs: Tensor,
        batch: ProgramBatch,
        kv: Sequence[LayerKV],
        sampled: Tensor | None,  # None: only hidden states are computed
    ) -> None:
        """Checks a batch and runs segments of the program. The results are left in the buffers."""
        n_tokens, n_sampled = inputs.shape[0], 0 if sampled is None else sampled.shape[0]
        positions, into = batch.positions, self.program.inputs
        if n_tokens != positions.shape[0]:
            raise ValueError(f"{n_tokens} inputs, {len(positions)} positions")
        places = self._storage.places(batch, n_tokens)
        if into is not None and (inputs.dtype, inputs.shape[1]) != (into.dtype, into.width):
            raise ValueError(
                f"hidden states {tuple(inputs.shape)} of {inputs.dtype} where layers are "
                f"{into.dtype} and {into.width} wide"
            )
        struct = BatchStruct(
            self._buffers.address(n_tokens, n_sampled),
            self._storage.of(kv),
            self._angles.covering(positions),
            n_tokens,
            int64_address(inputs) if into is None else None,
            int64_address(positions),
            *places,
            None if sampled is None else int64_address(sampled),
            n_sampled,
            self._argmax.address,
            self._max_ids,
            min(self._max_positions, self._angles.n_positions),
            self._storage.states(batch),
            *self._adapters(batch, n_tokens, n_sampled),
        )
        n_wrong = self._n_wrong(ctypes.byref(struct))
        if n_wrong:
            raise IndexError(
                f"{n_wrong} tokens or positions are not in the tables, or places not in the batch"
            )
        if into is not None:
            self._buffers.tensor(into, n_tokens).copy_(inputs)
        frame = None
        if len(segments) > 1:
            frame = Frame.of(self.program, self._ops, inputs, batch, kv)
        self._run_segments(segments, struct, frame)

    def _adapters(
        self, batch: ProgramBatch, n_tokens: int, n_sampled: int
    ) -> tuple[AdapterRowsStruct, AdapterRowsStruct]:
        """Returns the structures of the adapters of a batch's tokens and of its sampled tokens. The
        structures are all zeros if no token has an adapter, or if the program has no adapters."""
        adapters = batch.adapters if self._n_adapters else None
        if adapters is None:
            return AdapterRowsStruct(), AdapterRowsStruct()
        sampled = self._adapter_rows(adapters.sampled, n_sampled) if n_sampled else None
        return self._adapter_rows(adapters.tokens, n_tokens), sampled or AdapterRowsStruct()

    def _adapter_rows(self, rows: AdapterRows | None, n: int) -> AdapterRowsStruct:
        """Returns the structure of the adapters of `n` rows. Raises ValueError if `rows` are for
        another number of rows, or for fewer adapters than the program has."""
        if rows is None or not self._n_adapters:
            return AdapterRowsStruct()
        if len(rows.adapters) != n or rows.n_adapters < self._n_adapters:
            raise ValueError(
                f"{rows.n_adapters} adapters of {len(rows.adapters)} rows, where the program has "
                f"{self._n_adapters} and the batch {n}"
            )
        return AdapterRowsStruct(rows.rows.ctypes.data, rows.begins.ctypes.data)

    def _run_segments(
        self, segments: Sequence[_Segment], batch: BatchStruct, frame: Frame | None
    ) -> None:
        """Runs segments of the program. `frame` has the tensors for the steps that Python runs.
        `frame` may be None if the library can run all steps."""
        for segment in segments:
            self._run(
                segment.steps, segment.n_steps, ctypes.byref(batch), ctypes.byref(self.seconds)
            )
            if segment.other is not None and frame is not None:
                self._run_other(segment.other, batch, frame)

    def _run_other(self, step: _OtherStep, batch: BatchStruct, frame: Frame) -> None:
        """Runs a step that the library cannot run, on tensors that share the memory of the
        library's buffers."""
        rows = [
            self._buffers.tensor(each, batch.n_sampled if each.is_of_sampled else batch.n_tokens)
            for each in step.buffers
        ]
        for buffer, tensor in zip(step.buffers, rows, strict=True):
            frame.rows[buffer.index] = tensor
        step.function(step.step, frame)
        for buffer, tensor in zip(step.buffers, rows, strict=True):
            if frame.rows[buffer.index] is not tensor:
                tensor.copy_(frame.rows[buffer.index])


def _is_of_library(step: object) -> bool:
    """Returns whether the library can run a step. It can run `EmbedPacked` only if the table is a
    `PanelTable`."""
    if isinstance(step, EmbedPacked):
        return isinstance(step.table, PanelTable)
    return type(step) in STEPS


class _OtherStep:
    """A step that the library cannot run, with the interpreter's function for this step."""

    def __init__(self, step: object) -> None:
        self.step = step
        self.function = function_of(step)
        self.buffers: tuple[Buffer, ...] = tuple(buffers_of(step))


class _Argmax:
    """Memory for the argmax of each of `n` rows of logits."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.values = np.empty(n, np.int64)
        self.address = self.values.ctypes.data


_TABLES = (Embed, EmbedPacked)


def _n_rows(step: Embed | EmbedPacked) -> int:
    return int(step.table.shape[0])


def _n_adapters(step: object) -> int:
    """Returns the number of adapters that a batch must have at least, so that the indices of all
    adapters in a step are valid. Returns 0 for a step without adapters."""
    if not isinstance(step, AddLowRank):
        return 0
    return 1 + max((one.adapter for one in step.each), default=-1)


_POSITIONED = (AddPositions, ScaleByPosition)


def _n_positions(step: AddPositions | ScaleByPosition) -> int:
    """Returns the number of positions for which the table or the factors of a step have entries."""
    if isinstance(step, AddPositions):
        return len(step.table)
    return len(step.factors) * step.length


class _Segment:
    """A series of steps that the library runs in one call, and the step after them, which Python
    runs. There may be no such step."""

    def __init__(self, steps: Sequence[StepStruct], other: object) -> None:
        self.steps = (StepStruct * len(steps))(*steps)
        self.n_steps = len(steps)
        self.other = None if other is None else _OtherStep(other)


class _AnglesAddresses:
    """The addresses of the angle tables, one for each kind of rotary embedding.

    The address of a table is read again when a longer table has replaced it.
    """

    n_positions: int
    """Number of positions for which the tables of all kinds have entries."""

    def __init__(self, program: Program) -> None:
        # The kinds that the program uses, each with a buffer of the width that its angles need.
        self._used = {
            step.rotary: (program.rotaries[step.rotary], step.cos)
            for step in program.steps
            if isinstance(step, LookUpAngles)
        }
        self._structs = (AnglesStruct * (len(program.rotaries) + 1))()
        self._known: dict[int, tuple[Tensor, Tensor]] = {}
        self.n_positions = _NO_LIMIT
        self._look_up_new()

    def covering(self, positions: Tensor) -> int:
        """Extends the angle tables so that they cover `positions`. Returns the address of an array
        with an `AnglesStruct` for each table. Raises ValueError if a table has another element type
        or shape than the layers need."""
        for rotary, _ in self._used.values():
            rotary.cover(positions)
        self._look_up_new()
        return ctypes.addressof(self._structs)

    def _look_up_new(self) -> None:
        for kind, (rotary, buffer) in self._used.items():
            angles, known = tables_of(rotary), self._known.get(kind)
            if known is None or known[0] is not angles.cos or known[1] is not angles.signed_sin:
                self._look_up(kind, angles, buffer)

    def _look_up(self, kind: int, angles: Angles, buffer: Buffer) -> None:
        both = cos, sin = angles.cos, angles.signed_sin
        for each in both:
            is_dense = each.shape[1:] == (1, buffer.width) and each.is_contiguous()
            if each.dtype != buffer.dtype or not is_dense or len(each) != len(cos):
                raise ValueError(
                    f"angles {tuple(each.shape)} of {each.dtype} where layers need "
                    f"{(len(cos), 1, buffer.width)} of {buffer.dtype}"
                )
        self._known[kind] = both  # a reference, which keeps the tables alive
        self._structs[kind] = AnglesStruct(cos.data_ptr(), sin.data_ptr())
        self.n_positions = min(len(cos) for cos, _ in self._known.values())


def tables_of(rotary: RotaryAngles) -> Angles:
    """Returns the tables of angles of a rotary embedding. Raises ValueError if the embedding has no
    tables."""
    if rotary.angles is None:
        raise ValueError("a native program needs tables of angles")
    return rotary.angles
