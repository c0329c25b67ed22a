"""The storage of a program's layers: keys and values in blocks, or states in rows.

The storage of a layer is two tensors, whose shapes depend on the steps of the layer. The tensors
are checked and their addresses are read in the first run. This is repeated only if a later run has
another object as the first tensor of the first layer, or another number of layers.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from kernels.native.structs import LayerKVStruct, StateSpansStruct
from kernels.ops import LayerKV, ProgramBatch
from kernels.program import Program
from kernels.pytorch.attention import AttentionSpans
from kernels.steps import Attend, RotaryWriteKV, RunDeltaNet, WriteKV, WriteLatents

_IN_BLOCKS = (RotaryWriteKV, WriteKV, WriteLatents, Attend)


class LayerStorage:
    """Keeps the addresses of the storage of all layers of a program, for the native library.

    Only a weak reference to the first tensor of the storage is held, so that the storage can be
    freed.
    """

    def __init__(self, program: Program) -> None:
        self._dtype = program.dtype
        kinds = (*_IN_BLOCKS, RunDeltaNet)
        self._users = [step for step in program.steps if isinstance(step, kinds)]
        self._groups = {
            step.layer: program.group_of(step.layer)
            for step in self._users
            if isinstance(step, _IN_BLOCKS)
        }
        self._has_states = any(isinstance(step, RunDeltaNet) for step in self._users)
        self._first: Callable[[], Tensor | None] = lambda: None
        self._structs: Any = None

    def of(self, kv: Sequence[LayerKV]) -> int:
        """Returns the address of an array with a `LayerKVStruct` for each layer. Returns 0 if no
        step uses storage. Raises ValueError for storage that does not fit the layers."""
        if not self._users:
            return 0
        first = kv[0][0]
        if self._first() is not first or len(self._structs) != len(kv):
            self._structs = (LayerKVStruct * len(kv))()
            for step in self._users:
                _check(step, kv[step.layer], self._dtype)
                keys, values = kv[step.layer]
                group = self._groups.get(step.layer, 0)
                self._structs[step.layer] = LayerKVStruct(
                    keys.data_ptr(), values.data_ptr(), keys.shape[1], group
                )
            self._first = weakref.ref(first)
        return ctypes.addressof(self._structs)

    def places(self, batch: ProgramBatch, n_tokens: int) -> tuple[Any, ...]:
        """Returns the values of the six fields of a `BatchStruct` from `slots` to `n_columns`: the
        K/V slots of the tokens, and the spans and block tables for attention.

        Raises ValueError if the number of slots differs from the number of tokens, if block tables
        have different shapes, or if the batch lacks the K/V group of a layer. Raises TypeError for
        a plan that other operations made.
        """
        if not self._groups:
            return None, None, None, None, 0, 0
        groups = batch.of_groups()
        if max(self._groups.values()) >= len(groups):
            raise ValueError(f"{len(groups)} K/V groups for layers of {self._groups}")
        slots = [each.slots for each in groups]
        if any(each.shape[0] != n_tokens for each in slots):
            raise ValueError(f"{n_tokens} inputs, {[len(each) for each in slots]} slots")
        spans = [AttentionSpans.of(each.attention) for each in groups]
        tables = [each.block_tables.shape for each in spans]
        if len(set(tables)) > 1:
            raise ValueError(f"block tables of {tables} for one batch")
        return (
            _addresses([int64_address(each) for each in slots]),
            spans[0].start_positions.data_ptr(),
            spans[0].n_tokens.data_ptr(),
            _addresses([each.block_tables.data_ptr() for each in spans]),
            *spans[0].block_tables.shape,
        )

    def states(self, batch: ProgramBatch) -> StateSpansStruct:
        """Returns the structure of the batch's `StateSpans`. It is all zeros if no layer keeps
        states. Raises ValueError if layers keep states but the batch has no `StateSpans`."""
        if not self._has_states:
            return StateSpansStruct()
        spans = batch.states
        if spans is None:
            raise ValueError("the batch does not say where the states of its requests are")
        columns = (spans.first_tokens, spans.n_tokens, spans.rows, spans.start_positions)
        return StateSpansStruct(*(int64_address(each) for each in columns), len(spans.rows))


def _addresses(addresses: list[int]) -> Any:
    """Returns a C array of `addresses`. If the array becomes a field of a structure, the structure
    keeps it alive."""
    return (ctypes.c_void_p * len(addresses))(*addresses)


def int64_address(x: Tensor) -> int:
    """Returns the memory address of the data of `x`. Raises ValueError if `x` is not dense and
    int64."""
    if x.dtype != torch.int64 or not x.is_contiguous():
        raise ValueError(f"{x.dtype} with strides {x.stride()} where int64 without gaps is needed")
    return x.data_ptr()


@singledispatch
def _check(step: Any, stored: LayerKV, dtype: torch.dtype) -> None:
    """Raises ValueError if the storage of a layer has another type or shape than `step` needs.
    `dtype` is the type of the program's hidden states."""


@_check.register
def _(step: RotaryWriteKV | WriteKV, stored: LayerKV, dtype: torch.dtype) -> None:
    heads = step.heads
    for cache in stored:
        _check_cache(cache, dtype, heads.n_kv_heads, heads.head_dim)


@_check.register
def _(step: Attend, stored: LayerKV, dtype: torch.dtype) -> None:
    heads = step.heads
    for cache in stored[:1] if step.n_shared else stored:
        _check_cache(cache, dtype, heads.n_kv_heads, heads.head_dim)


@_check.register
def _(step: WriteLatents, stored: LayerKV, dtype: torch.dtype) -> None:
    _check_cache(stored[0], dtype, 1, step.x.width)


def _check_cache(cache: Tensor, dtype: torch.dtype, n_heads: int, head_dim: int) -> None:
    is_fit = cache.shape[2:] == (n_heads, head_dim)
    if cache.dtype != dtype or not is_fit or not cache.is_contiguous():
        raise ValueError(
            f"storage {tuple(cache.shape)} of {cache.dtype} where layers are "
            f"{dtype} with heads {(n_heads, head_dim)}"
        )


@_check.register
def _(step: RunDeltaNet, stored: LayerKV, dtype: torch.dtype) -> None:
    form, (inputs, states) = step.form, stored
    is_fit = inputs.shape[1:] == (form.kernel_size - 1, form.n_channels) and states.shape[1:] == (
        form.n_value_heads,
        form.key_dim,
        form.value_dim,
    )
    is_typed = inputs.dtype == dtype and states.dtype == torch.float32
    is_dense = inputs.is_contiguous() and states.is_contiguous()
    if not is_fit or not is_typed or not is_dense or len(inputs) != len(states):
        raise ValueError(
            f"storage {tuple(inputs.shape)} of {inputs.dtype} and {tuple(states.shape)} of "
            f"{states.dtype} where layers are {dtype} with {form.n_channels} channels"
        )
