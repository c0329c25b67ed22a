"""Consecutive layers of what descends from Llama on the CPU, and the head after them, in one call.

The same operations in the same order as layer by layer, so the results are the same to the bit;
what it saves is the interpreter between them (`docs/performance.md` says how much that is).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.attention_metadata import AttentionForm
from kernels.head_norms import HeadNorms
from kernels.native.attention import AttentionSpans
from kernels.native.call import ELEMENT
from kernels.native.linear import (
    NativeGatedWeight,
    NativeInt8GatedWeight,
    NativeInt8Weight,
    NativeWeight,
)

_pointer, _int, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Weight(ctypes.Structure):
    _fields_ = (
        ("packed", _pointer),
        ("starts", _pointer),
        ("scales", _pointer),
        ("bias", _pointer),
        ("n_in", _int),
        ("n_out", _int),
        ("finish", _int),
    )


class _Norm(ctypes.Structure):
    _fields_ = (("element", _int), ("weight", _pointer), ("eps", _float))


class _Layer(ctypes.Structure):
    _fields_ = (
        ("attention_norm", _Norm),
        ("qkv", _Weight),
        ("query_norm", _Norm),
        ("key_norm", _Norm),
        ("output", _Weight),
        ("mlp_norm", _Norm),
        ("gate_up", _Weight),
        ("down", _Weight),
        ("window", _int),
        ("scale", _float),
        ("soft_cap", _float),
    )


class _Head(ctypes.Structure):
    _fields_ = (("norm", _Norm), ("weight", _Weight))


class _Sizes(ctypes.Structure):
    _fields_ = tuple(
        (name, _int)
        for name in ("element", "n_layers", "n_heads", "n_kv_heads", "head_dim", "block_size")
    )


class _Tokens(ctypes.Structure):
    _fields_ = (
        ("n_tokens", _int),
        ("cos", _pointer),
        ("sin", _pointer),
        ("slots", _pointer),
        ("starts", _pointer),
        ("counts", _pointer),
        ("blocks", _pointer),
        ("n_spans", _int),
        ("n_columns", _int),
    )


class _Sampled(ctypes.Structure):
    _fields_ = (("tokens", _pointer), ("n", _int), ("logits", _pointer))


class Seconds(ctypes.Structure):
    """What the layers of one `NativeLayers` have taken, by kind of operation."""

    _fields_ = (
        ("linear", ctypes.c_double),
        ("attention", ctypes.c_double),
        ("other", ctypes.c_double),
    )

    linear: float
    attention: float
    other: float


Projection = NativeWeight | NativeInt8Weight
Gated = NativeGatedWeight | NativeInt8GatedWeight


@dataclass(frozen=True, slots=True)
class NativeLayer:
    """The weights of one layer: attention, then a gated MLP, each on the normalised residual."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    attention_norm: Tensor  # [hidden_size]
    attention_eps: float
    qkv: Projection
    qkv_bias: Tensor | None
    head_norms: HeadNorms | None
    form: AttentionForm
    output: Projection
    output_bias: Tensor | None
    mlp_norm: Tensor  # [hidden_size]
    mlp_eps: float
    gate_up: Gated
    down: Projection
    down_bias: Tensor | None

    @property
    def sizes(self) -> tuple[int, ...]:
        """What layers that run at once have in common."""
        inside = (*self.qkv.shape, *self.output.shape, *self.gate_up.shape, *self.down.shape)
        return self.n_heads, self.n_kv_heads, self.head_dim, *inside

    def refuse_others_than(self, dtype: torch.dtype) -> None:
        """Raises ValueError if a weight or bias is not of `dtype`, or int8, or norms of heads
        differ."""
        for weight in (self.qkv, self.output, self.gate_up, self.down):
            _refuse_others_than(dtype, weight)
        for bias in (self.qkv_bias, self.output_bias, self.down_bias):
            if bias is not None and (bias.dtype != dtype or not bias.is_contiguous()):
                raise ValueError(f"a bias of {bias.dtype} where layers are {dtype}")
        if self.head_norms is not None and self.head_norms.q.dtype != self.head_norms.k.dtype:
            raise ValueError("norms of queries and of keys of different types")

    def norms(self) -> list[Tensor]:
        """What norms multiply by."""
        heads = [] if self.head_norms is None else [self.head_norms.q, self.head_norms.k]
        return [self.attention_norm, self.mlp_norm, *heads]


@dataclass(frozen=True, slots=True)
class NativeHead:
    """What makes logits of the last layer's hidden states."""

    norm: Tensor  # [hidden_size]
    eps: float
    weight: Projection  # [vocab_size, hidden_size]


class NativeLayers:
    """Layers of the same sizes, one after the other, and perhaps a head."""

    def __init__(
        self,
        library: ctypes.CDLL,
        layers: Sequence[NativeLayer],
        head: NativeHead | None,
        dtype: torch.dtype,
    ) -> None:
        """`dtype` is that of hidden states, K/V, biases and logits.

        Raises ValueError if the library does not take them: it does not look itself.
        """
        if len({layer.sizes for layer in layers}) != 1:
            raise ValueError("layers of different sizes, or none")
        if dtype not in ELEMENT:
            raise ValueError(f"the native library does not compute with {dtype}")
        norms = [norm for layer in layers for norm in layer.norms()]
        for layer in layers:
            layer.refuse_others_than(dtype)
        if head is not None:
            norms.append(head.norm)
            _refuse_others_than(dtype, head.weight)
            if head.weight.shape[1] != layers[0].qkv.shape[1]:
                raise ValueError("a head for other hidden states than those of the layers")
        for norm in norms:
            if norm.dtype not in ELEMENT or not norm.is_contiguous():
                raise ValueError(f"a norm of {norm.dtype} with strides {norm.stride()}")
        self.head = head
        self._weights = tuple(layers)  # the library has their addresses
        self._dtype = dtype
        self._layers = (_Layer * len(layers))(*map(_layer, layers))
        self._head: Any = None  # a null pointer
        if head is not None:
            self._head = ctypes.pointer(_Head(_norm(head.norm, head.eps), _weight(head.weight)))
        self._caches = _pointer * (2 * len(layers))
        self._sizes = _Sizes(
            ELEMENT[dtype],
            len(layers),
            layers[0].n_heads,
            layers[0].n_kv_heads,
            layers[0].head_dim,
            0,  # the block size, which K/V say
        )
        self.seconds = Seconds()
        """Of all calls until now."""
        self._room = library.orcinus_layers_room
        self._room.argtypes = (_pointer, _pointer, _int)
        self._room.restype = _int
        self._run = library.orcinus_layers
        self._run.argtypes = (_pointer,) * 9
        self._run.restype = None

    def __call__(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        plan: AttentionSpans,
        kv: Sequence[tuple[Tensor, Tensor]],
        sampled: Tensor | None = None,
    ) -> Tensor:
        """Of hidden states [n_tokens, hidden_size], which are used up, those after the last layer,
        or the logits [n_sampled, vocab_size] after the tokens `sampled` [n_sampled], in order.

        `cos` and `sin` are as in `kernels.rotary`, `slots` [n_tokens] int64 says where K and V are
        stored, `kv` has each layer's keys and values [n_blocks, block_size, n_kv_heads, head_dim].

        Raises ValueError if these are of other types, or angles not dense, or there is no head.
        """
        tensors = (hidden, cos, sin, *kv[0])
        if any(x.dtype != self._dtype for x in tensors):
            raise ValueError(f"{[x.dtype for x in tensors]} where layers are {self._dtype}")
        if not (cos.is_contiguous() and sin.is_contiguous()):
            raise ValueError("angles with gaps")
        if len(kv) != len(self._weights):
            raise ValueError(f"keys and values of {len(kv)} layers for {len(self._weights)}")
        hidden = hidden.contiguous()
        result, wanted = hidden, _Sampled()
        if sampled is not None:
            if self.head is None or sampled.dtype != torch.int64 or not sampled.is_contiguous():
                raise ValueError("tokens are sampled by a head, and int64")
            n_sampled, vocab_size = len(sampled), self.head.weight.shape[0]
            result = torch.empty((n_sampled, vocab_size), dtype=self._dtype)
            wanted = _Sampled(sampled.data_ptr(), n_sampled, result.data_ptr())
        n_tokens = hidden.shape[0]
        n_spans, n_columns = plan.block_tables.shape
        tokens = _Tokens(
            n_tokens,
            cos.data_ptr(),
            sin.data_ptr(),
            slots.data_ptr(),
            *plan.addresses,
            n_spans,
            n_columns,
        )
        self._sizes.block_size = kv[0][0].shape[1]
        layers, sizes = ctypes.byref(self._layers), ctypes.byref(self._sizes)
        caches = self._caches(*[cache.data_ptr() for pair in kv for cache in pair])
        room = torch.empty(self._room(layers, sizes, n_tokens), dtype=torch.uint8)
        self._run(
            layers,
            None if sampled is None else self._head,
            sizes,
            ctypes.byref(tokens),
            ctypes.byref(wanted),
            ctypes.byref(caches),
            hidden.data_ptr(),
            room.data_ptr(),
            ctypes.byref(self.seconds),
        )
        return result


def _refuse_others_than(dtype: torch.dtype, weight: Projection | Gated) -> None:
    if isinstance(weight, NativeInt8Weight | NativeInt8GatedWeight):
        return  # which is for all
    if weight.packed.dtype != dtype:
        raise ValueError(f"a weight of {weight.packed.dtype} where layers are {dtype}")


def _layer(layer: NativeLayer) -> _Layer:
    form, heads = layer.form, layer.head_norms
    return _Layer(
        _norm(layer.attention_norm, layer.attention_eps),
        _weight(layer.qkv, layer.qkv_bias),
        _Norm() if heads is None else _norm(heads.q, heads.eps),
        _Norm() if heads is None else _norm(heads.k, heads.eps),
        _weight(layer.output, layer.output_bias),
        _norm(layer.mlp_norm, layer.mlp_eps),
        _weight(layer.gate_up),
        _weight(layer.down, layer.down_bias),
        form.window or 0,
        layer.head_dim**-0.5 if form.scale is None else form.scale,
        form.soft_cap or 0.0,
    )


def _norm(weight: Tensor, eps: float) -> _Norm:
    return _Norm(ELEMENT[weight.dtype], weight.data_ptr(), eps)


def _weight(weight: Projection | Gated, bias: Tensor | None = None) -> _Weight:
    n_out, n_in = weight.shape
    finish = weight.gate if isinstance(weight, Gated) else 0
    bias_address = None if bias is None else bias.data_ptr()
    if isinstance(weight, NativeInt8Weight | NativeInt8GatedWeight):
        panels = weight.panels
        return _Weight(
            panels.packed.data_ptr(),
            panels.starts.data_ptr(),
            panels.scales.data_ptr(),
            bias_address,
            n_in,
            n_out,
            finish,
        )
    return _Weight(weight.packed.data_ptr(), None, None, bias_address, n_in, n_out, finish)
