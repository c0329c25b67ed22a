"""A stage of a decoder that descends from Llama in one call of the library.

The call may begin with a table of tokens and end with a head's logits. It computes the operations
that layer by layer computes, in the same order, so the results are equal to the bit. It saves the
interpreter between operations (`docs/performance.md` says how much time that is).
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.attention import AttentionSpans
from kernels.layer import Angles, StageWeights
from kernels.logits import Logits
from kernels.native.call import NO_MEMORY, out_of_memory
from kernels.native.checks import check, hidden_size_of, native_part
from kernels.native.structs import BatchStruct, Seconds, StageStruct, filled
from kernels.ops import AttentionPlan, LayerKV


def fuse_layers(
    library: ctypes.CDLL, stage: StageWeights, dtype: torch.dtype, /
) -> NativeLayers | None:
    """Implements `kernels.ops.FuseLayers`, for one build of the library."""
    part = native_part(stage)
    return None if part is None else NativeLayers(library, part, dtype)


class NativeLayers:
    """Implements `kernels.ops.FusedStage`."""

    def __init__(self, library: ctypes.CDLL, stage: StageWeights, dtype: torch.dtype) -> None:
        """Takes the addresses of the tensors of `stage`, which is one of `native_part`, and keeps
        the tensors. Raises ValueError for tensors that are not as `dtype` needs them."""
        check(stage, dtype)
        self.stage = stage
        self.seconds = Seconds()
        self._dtype = dtype
        self._hidden_size = hidden_size_of(stage)
        self._n_layers = len(stage.layers)
        self._n_groups = 1 + max(layer.group for layer in stage.layers)
        self._struct = StageStruct.of(stage, dtype)
        self._run = library.orcinus_layers
        self._run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        self._run.restype = ctypes.c_int64
        self._memory_bytes = library.orcinus_layers_memory
        self._memory_bytes.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        self._memory_bytes.restype = ctypes.c_int64
        # Kept from call to call, since to allocate costs more than to use it.
        self._memory = _Memory()
        self._vocab_size = 0 if stage.head is None else stage.head.weight.shape[0]
        self._room = _LogitsRoom(0, self._vocab_size, dtype)
        self._kv = _KVAddresses()

    def __call__(
        self,
        inputs: Tensor,
        positions: Tensor,
        slots: Sequence[Tensor],
        plans: Sequence[AttentionPlan],
        kv: Sequence[LayerKV],
    ) -> Tensor:
        """Implements `kernels.ops.FusedStage`."""
        if self.stage.table is None:
            hidden = inputs.contiguous()
        else:
            hidden = torch.empty((len(inputs), self._hidden_size), dtype=self._dtype)
        self._compute(inputs, hidden, positions, slots, plans, kv)
        return hidden

    def logits(
        self,
        inputs: Tensor,
        positions: Tensor,
        slots: Sequence[Tensor],
        plans: Sequence[AttentionPlan],
        kv: Sequence[LayerKV],
        sampled: Tensor,
    ) -> Logits:
        """Implements `kernels.ops.FusedStage`."""
        if self.stage.head is None:
            raise ValueError("layers without a head have no logits")
        n_sampled = sampled.shape[0]
        if self._room.n != n_sampled:
            self._room = _LogitsRoom(n_sampled, self._vocab_size, self._dtype)
        hidden = None if self.stage.table is not None else inputs.contiguous()
        self._compute(inputs, hidden, positions, slots, plans, kv, sampled)
        return self._room.logits

    def _compute(
        self,
        inputs: Tensor,
        hidden: Tensor | None,  # None: only logits are wanted
        positions: Tensor,
        slots: Sequence[Tensor],
        plans: Sequence[AttentionPlan],
        kv: Sequence[LayerKV],
        sampled: Tensor | None = None,  # None: only hidden states are wanted
    ) -> None:
        """Checks a batch and runs it; hidden states are written to `hidden`, logits to the room."""
        spans = [AttentionSpans.of(plan) for plan in plans]
        given = kv[0] if hidden is None else (hidden, *kv[0])
        if any(x.dtype != self._dtype for x in given):
            raise ValueError(f"{[x.dtype for x in given]} where layers are {self._dtype}")
        if len(kv) != self._n_layers:
            raise ValueError(f"keys and values of {len(kv)} layers for {self._n_layers}")
        n_tokens = inputs.shape[0]
        if any(x.shape[0] != n_tokens for x in (positions, *slots)):
            n_slots = [len(each) for each in slots]
            raise ValueError(f"{n_tokens} inputs, {len(positions)} positions, {n_slots} slots")
        if not self._n_groups <= len(slots) == len(spans):
            raise ValueError(f"{len(slots)} K/V groups for layers of {self._n_groups}")
        if hidden is not None and hidden.shape[1] != self._hidden_size:
            raise ValueError(f"hidden states {tuple(hidden.shape)} for {self._hidden_size}")
        if n_tokens > self._memory.n_tokens:
            n_bytes = self._memory_bytes(ctypes.byref(self._struct), n_tokens)
            self._memory = _Memory(n_tokens, n_bytes)
        if self._struct.angles.cos.length != len(self.stage.angles.cos):  # longer ones have come
            self._struct.angles = filled(Angles, self.stage.angles)
        wanted = () if sampled is None else (_int64_address(sampled), *self._room.addresses)
        batch = BatchStruct(
            n_tokens,
            None if self.stage.table is None else _int64_address(inputs),
            _int64_address(positions),
            _addresses([_int64_address(each) for each in slots]),
            spans[0].start_positions.data_ptr(),
            spans[0].n_tokens.data_ptr(),
            _addresses([each.block_tables.data_ptr() for each in spans]),
            *spans[0].block_tables.shape,
            self._kv.of(kv),
            kv[0][0].shape[1],
            None if hidden is None else hidden.data_ptr(),
            self._memory.address,
            *wanted,
        )
        n_wrong = self._run(
            ctypes.byref(self._struct), ctypes.byref(batch), ctypes.byref(self.seconds)
        )
        if n_wrong == NO_MEMORY:
            raise out_of_memory()
        if n_wrong:
            raise IndexError(
                f"{n_wrong} tokens or positions are not in the tables, or places not in the batch"
            )


class _Memory:
    """Memory for intermediate results, for batches of up to `n_tokens`."""

    def __init__(self, n_tokens: int = 0, n_bytes: int = 0) -> None:
        self.n_tokens = n_tokens
        self._bytes = torch.empty(n_bytes, dtype=torch.uint8)
        self.address = self._bytes.data_ptr()


class _LogitsRoom:
    """Memory for the logits of `n` tokens and for their argmax."""

    def __init__(self, n: int, vocab_size: int, dtype: torch.dtype) -> None:
        self.n = n
        values, argmax = torch.empty((n, vocab_size), dtype=dtype), np.empty(n, np.int64)
        self.logits = Logits(values, argmax)
        self.addresses = n, values.data_ptr(), argmax.ctypes.data


class _KVAddresses:
    """The addresses of the K/V storage of one epoch, looked up once.

    Storage is recognised by its first tensor, and not kept alive.
    """

    def __init__(self) -> None:
        self._keys: Callable[[], Tensor | None] = lambda: None
        self._addresses: Any = None

    def of(self, kv: Sequence[LayerKV]) -> int:
        """Returns where the addresses of all keys and values lie, layer by layer."""
        if self._keys() is not kv[0][0]:
            addresses = [cache.data_ptr() for pair in kv for cache in pair]
            self._addresses = (ctypes.c_void_p * len(addresses))(*addresses)
            self._keys = weakref.ref(kv[0][0])
        return ctypes.addressof(self._addresses)


def _addresses(addresses: list[int]) -> Any:
    """Returns an array of these addresses, which lives as long as what it is passed in."""
    return (ctypes.c_void_p * len(addresses))(*addresses)


def _int64_address(x: Tensor) -> int:
    """Returns where `x` lies; raises ValueError if it is not dense and int64."""
    if x.dtype != torch.int64 or not x.is_contiguous():
        raise ValueError(f"{x.dtype} with strides {x.stride()} where int64 without gaps is needed")
    return x.data_ptr()
