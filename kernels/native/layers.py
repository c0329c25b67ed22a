"""Programs in calls of the library: one call for all steps between two that are Python's.

A call computes the operations that layer by layer computes, in the same order, so the results are
equal to the bit. It saves the interpreter between operations (`docs/performance.md` says how much
time that is).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from kernels.logits import Logits
from kernels.native.buffers import Buffers
from kernels.native.call import NO_MEMORY, out_of_memory
from kernels.native.checks import check, is_native
from kernels.native.storage import Storage, int64_address
from kernels.native.structs import (
    AnglesStruct,
    BatchStruct,
    Seconds,
    StepStruct,
    step_of,
)
from kernels.ops import FusedBatch, LayerKV
from kernels.program import Angles, Program
from kernels.steps import (
    AddPositions,
    Buffer,
    Call,
    Embed,
    EmbedPacked,
    LookUpAngles,
    ScaleByPosition,
)

_NO_LIMIT = 2**63 - 1


def fuse_layers(library: ctypes.CDLL, program: Program, /) -> NativeLayers | None:
    """Implements `kernels.ops.FuseLayers`, for one build of the library."""
    return NativeLayers(library, program) if is_native(program) else None


class NativeLayers:
    """Implements `kernels.ops.FusedStage`."""

    def __init__(self, library: ctypes.CDLL, program: Program) -> None:
        """Takes the addresses of the tensors of a program that `is_native`, and keeps the tensors.

        Raises ValueError for tensors that do not fit each other.
        """
        check(program)
        self.program = program
        self.seconds = Seconds()
        self._run = library.orcinus_layers
        self._run.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
        self._run.restype = ctypes.c_int64
        self._n_wrong = library.orcinus_layers_n_wrong
        self._n_wrong.argtypes = (ctypes.c_void_p,)
        self._n_wrong.restype = ctypes.c_int64
        self._kept: list[object] = []
        steps, n_hidden = program.steps, program.n_hidden_steps
        self._layers = self._segments(steps[:n_hidden])
        self._whole = self._segments(steps)
        self._buffers = Buffers(program)
        self._storage = Storage(program)
        self._angles = _AnglesAddresses(program)
        self._max_ids = min(
            (_n_rows(s) for s in steps if isinstance(s, _TABLES)), default=_NO_LIMIT
        )
        self._max_positions = min(
            (_n_positions(s) for s in steps if isinstance(s, _POSITIONED)), default=_NO_LIMIT
        )
        self._argmax = _Argmax(0)

    def __call__(self, inputs: Tensor, batch: FusedBatch, kv: Sequence[LayerKV]) -> Tensor:
        """Implements `kernels.ops.FusedStage`."""
        self._compute(self._layers, inputs, batch, kv, None)
        hidden = _given(self.program.hidden)
        # A copy, since it may still be sent when the next batch runs.
        return self._buffers.tensor(hidden, inputs.shape[0]).clone()

    def logits(
        self, inputs: Tensor, batch: FusedBatch, kv: Sequence[LayerKV], sampled: Tensor
    ) -> Logits:
        """Implements `kernels.ops.FusedStage`."""
        if self.program.logits is None:
            raise ValueError("layers without a head have no logits")
        n_sampled = sampled.shape[0]
        if self._argmax.n != n_sampled:
            self._argmax = _Argmax(n_sampled)
        self._compute(self._whole if n_sampled else self._layers, inputs, batch, kv, sampled)
        logits = self._buffers.tensor(self.program.logits, n_sampled)
        return Logits(logits, self._argmax.values)

    def _segments(self, steps: Sequence[object]) -> list[_Segment]:
        """Returns the steps up to each that is Python's, and that one."""
        segments: list[_Segment] = []
        native: list[StepStruct] = []
        for step in steps:
            if isinstance(step, Call):
                segments.append(_Segment(native, step))
                native = []
            else:
                native.append(step_of(step, self._kept))
        return [*segments, _Segment(native, None)]

    def _compute(
        self,
        segments: Sequence[_Segment],
        inputs: Tensor,
        batch: FusedBatch,
        kv: Sequence[LayerKV],
        sampled: Tensor | None,  # None: only hidden states are wanted
    ) -> None:
        """Checks a batch and runs steps of the program; results are in its buffers."""
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
            self._angles.current(),
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
        )
        n_wrong = self._n_wrong(ctypes.byref(struct))
        if n_wrong:
            raise IndexError(
                f"{n_wrong} tokens or positions are not in the tables, or places not in the batch"
            )
        if into is not None:
            self._buffers.tensor(into, n_tokens).copy_(inputs)
        for segment in segments:
            status = self._run(
                segment.steps, segment.n_steps, ctypes.byref(struct), ctypes.byref(self.seconds)
            )
            if status == NO_MEMORY:
                raise out_of_memory()
            if segment.call is not None:
                tensors = (
                    self._buffers.tensor(each, n_sampled if each.is_of_sampled else n_tokens)
                    for each in segment.call.buffers
                )
                segment.call.function(batch, kv, *tensors)


class _Argmax:
    """Memory for the argmax of the logits of `n` tokens."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.values = np.empty(n, np.int64)
        self.address = self.values.ctypes.data


_TABLES = (Embed, EmbedPacked)


def _n_rows(step: Embed | EmbedPacked) -> int:
    return int(step.table.shape[0])


_POSITIONED = (AddPositions, ScaleByPosition)


def _n_positions(step: AddPositions | ScaleByPosition) -> int:
    """Returns the positions that the tensor of a step has."""
    if isinstance(step, AddPositions):
        return len(step.table)
    return len(step.factors) * step.length


class _Segment:
    """Steps of the library, and the step of Python that follows."""

    def __init__(self, steps: Sequence[StepStruct], call: Call | None) -> None:
        self.steps = (StepStruct * len(steps))(*steps)
        self.n_steps = len(steps)
        self.call = call


class _AnglesAddresses:
    """The addresses of the angles of all kinds, looked up again when they have been replaced."""

    n_positions: int
    """The positions that all of them have."""

    def __init__(self, program: Program) -> None:
        # With the size of the heads that each kind turns.
        self._used = {
            step.rotary: (program.angles[step.rotary], step.cos)
            for step in program.steps
            if isinstance(step, LookUpAngles)
        }
        self._structs = (AnglesStruct * (len(program.angles) + 1))()
        self._known: dict[int, tuple[Tensor, Tensor]] = {}
        self.n_positions = _NO_LIMIT
        self.current()

    def current(self) -> int:
        """Returns where the addresses of all kinds lie; raises ValueError for angles that the
        library would misread."""
        for kind, (angles, buffer) in self._used.items():
            known = self._known.get(kind)
            if known is None or known[0] is not angles.cos or known[1] is not angles.signed_sin:
                self._look_up(kind, angles, buffer)
        return ctypes.addressof(self._structs)

    def _look_up(self, kind: int, angles: Angles, buffer: Buffer) -> None:
        both = cos, sin = angles.cos, angles.signed_sin
        for each in both:
            is_dense = each.shape[1:] == (1, buffer.width) and each.is_contiguous()
            if each.dtype != buffer.dtype or not is_dense or len(each) != len(cos):
                raise ValueError(
                    f"angles {tuple(each.shape)} of {each.dtype} where layers need "
                    f"{(len(cos), 1, buffer.width)} of {buffer.dtype}"
                )
        self._known[kind] = both  # which keeps them
        self._structs[kind] = AnglesStruct(cos.data_ptr(), sin.data_ptr())
        self.n_positions = min(len(cos) for cos, _ in self._known.values())


def _given(buffer: Buffer | None) -> Buffer:
    if buffer is None:
        raise ValueError("a program whose layers have not ended")
    return buffer
