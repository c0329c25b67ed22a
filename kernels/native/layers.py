"""Consecutive layers of what descends from Llama on the CPU, in one call, and with them a table of
tokens before them and the head after them.

The same operations in the same order as layer by layer, so the results are the same to the bit;
what it saves is the interpreter between them (`docs/performance.md` says how much that is).
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.logits import Logits
from kernels.native.attention import AttentionSpans
from kernels.native.stage import NativeStage
from kernels.native.structs import (
    BatchStruct,
    LayerStruct,
    Seconds,
    StageStruct,
    head_struct,
    layer_struct,
    sizes_struct,
    tables_struct,
)


class NativeLayers:
    """Layers one after the other, perhaps behind a table of tokens, and perhaps with a head."""

    def __init__(self, library: ctypes.CDLL, stage: NativeStage, dtype: torch.dtype) -> None:
        """`dtype` is that of hidden states, and with them of table, angles, K/V, biases and logits.

        Raises ValueError if the library does not take these.
        """
        stage.refuse_others_than(dtype)
        self.stage = stage
        self.seconds = Seconds()
        """Of all calls until now."""
        self._dtype = dtype
        self._layers = (LayerStruct * len(stage.layers))(*map(layer_struct, stage.layers))
        self._head = None if stage.head is None else head_struct(stage.head)
        # The library has the addresses of the tensors of `stage` and of the two above.
        self._stage = StageStruct(
            sizes_struct(stage, dtype),
            tables_struct(stage),
            ctypes.addressof(self._layers),
            None if self._head is None else ctypes.addressof(self._head),
        )
        self._run = library.orcinus_layers
        self._run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        self._run.restype = ctypes.c_int64
        self._memory_bytes = library.orcinus_layers_memory
        self._memory_bytes.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        self._memory_bytes.restype = ctypes.c_int64
        # Kept from call to call, since to allocate costs more than to use it.
        self._memory = _Memory()
        vocab_size = 0 if stage.head is None else stage.head.weight.shape[0]
        self._room = _LogitsRoom(0, vocab_size, dtype)
        self._kv = _KVAddresses()

    def __call__(
        self,
        inputs: Tensor,
        positions: Tensor,
        slots: Tensor,
        plan: AttentionSpans,
        kv: Sequence[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Of tokens [n_tokens], if there is a table, or else of hidden states
        [n_tokens, hidden_size], which are used up, those after the last layer.

        `positions` and `slots` are [n_tokens]: where tokens are in their sequences, and where their
        K and V are stored. `kv` has each layer's keys and values
        [n_blocks, block_size, n_kv_heads, head_dim]; if the first tensor is that of the last call,
        so are the others. Integers are int64.

        Raises:
            ValueError: these are of other types or shapes.
            IndexError: a token or position is not in the tables; nothing has been computed.
        """
        if self.stage.table is None:
            hidden = inputs.contiguous()
        else:
            hidden = torch.empty((len(inputs), self.stage.hidden_size), dtype=self._dtype)
        self._compute(inputs, hidden, positions, slots, plan, kv)
        return hidden

    def logits(
        self,
        inputs: Tensor,
        positions: Tensor,
        slots: Tensor,
        plan: AttentionSpans,
        kv: Sequence[tuple[Tensor, Tensor]],
        sampled: Tensor,
    ) -> Logits:
        """Of the same the logits after the tokens at the places `sampled` [n_sampled], in order.

        The next call overwrites them.

        Raises:
            ValueError: as above, or there is no head.
            IndexError: as above, or a place is not in the batch.
        """
        if self.stage.head is None:
            raise ValueError("layers without a head have no logits")
        n_sampled, vocab_size = sampled.shape[0], self.stage.head.weight.shape[0]
        if self._room.n != n_sampled:
            self._room = _LogitsRoom(n_sampled, vocab_size, self._dtype)
        hidden = None if self.stage.table is not None else inputs.contiguous()
        self._compute(inputs, hidden, positions, slots, plan, kv, sampled)
        return self._room.logits

    def _compute(
        self,
        inputs: Tensor,
        hidden: Tensor | None,  # None: only logits are wanted
        positions: Tensor,
        slots: Tensor,
        plan: AttentionSpans,
        kv: Sequence[tuple[Tensor, Tensor]],
        sampled: Tensor | None = None,  # None: no logits are
    ) -> None:
        given = kv[0] if hidden is None else (hidden, *kv[0])
        if any(x.dtype != self._dtype for x in given):
            raise ValueError(f"{[x.dtype for x in given]} where layers are {self._dtype}")
        if len(kv) != len(self.stage.layers):
            raise ValueError(f"keys and values of {len(kv)} layers for {len(self.stage.layers)}")
        n_tokens = inputs.shape[0]
        if not n_tokens == positions.shape[0] == slots.shape[0]:
            raise ValueError(f"{n_tokens} inputs, {len(positions)} positions, {len(slots)} slots")
        if hidden is not None and hidden.shape[1] != self.stage.hidden_size:
            raise ValueError(f"hidden states {tuple(hidden.shape)} for {self.stage.hidden_size}")
        if n_tokens > self._memory.n_tokens:
            n_bytes = self._memory_bytes(ctypes.byref(self._stage), n_tokens)
            self._memory = _Memory(n_tokens, n_bytes)
        wanted = () if sampled is None else (_int64_address(sampled), *self._room.addresses)
        batch = BatchStruct(
            n_tokens,
            None if self.stage.table is None else _int64_address(inputs),
            _int64_address(positions),
            _int64_address(slots),
            *plan.addresses,
            *plan.block_tables.shape,
            self._kv.of(kv),
            kv[0][0].shape[1],
            None if hidden is None else hidden.data_ptr(),
            self._memory.address,
            *wanted,
        )
        n_wrong = self._run(
            ctypes.byref(self._stage), ctypes.byref(batch), ctypes.byref(self.seconds)
        )
        if n_wrong:
            raise IndexError(
                f"{n_wrong} tokens or positions are not in the tables, or places not in the batch"
            )


class _Memory:
    """What the library computes in, for batches of up to `n_tokens`."""

    def __init__(self, n_tokens: int = 0, n_bytes: int = 0) -> None:
        self.n_tokens = n_tokens
        self._bytes = torch.empty(n_bytes, dtype=torch.uint8)
        self.address = self._bytes.data_ptr()


class _LogitsRoom:
    """Where the logits of `n` tokens go."""

    def __init__(self, n: int, vocab_size: int, dtype: torch.dtype) -> None:
        self.n = n
        values, likeliest = torch.empty((n, vocab_size), dtype=dtype), np.empty(n, np.int64)
        self.logits = Logits(values, likeliest)
        self.addresses = n, values.data_ptr(), likeliest.ctypes.data


class _KVAddresses:
    """The addresses of the storage of one epoch, looked up once.

    It is known by its first tensor, and not kept alive.
    """

    def __init__(self) -> None:
        self._keys: Callable[[], Tensor | None] = lambda: None
        self._addresses: Any = None

    def of(self, kv: Sequence[tuple[Tensor, Tensor]]) -> int:
        if self._keys() is not kv[0][0]:
            addresses = [cache.data_ptr() for pair in kv for cache in pair]
            self._addresses = (ctypes.c_void_p * len(addresses))(*addresses)
            self._keys = weakref.ref(kv[0][0])
        return ctypes.addressof(self._addresses)


def _int64_address(x: Tensor) -> int:
    if x.dtype != torch.int64 or not x.is_contiguous():
        raise ValueError(f"{x.dtype} with strides {x.stride()} where int64 without gaps is needed")
    return x.data_ptr()
