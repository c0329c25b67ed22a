"""GeLU and the gates of gated MLPs on the CPU."""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.native.call import ELEMENT, declare
from kernels.pytorch.gates import (
    clamp_and_mul,
    gelu,
    gelu_and_mul,
    gelu_tanh,
    sigmoid_and_mul,
    silu_and_mul,
)
from kernels.weights.linear import Clamp


class NativeGates:
    """The activations and gates on the CPU: `Ops.gelu`, `Ops.gelu_tanh`, `Ops.silu_and_mul`,
    `Ops.gelu_and_mul`, `Ops.clamp_and_mul` and `Ops.sigmoid_and_mul`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._silu = declare(library, "silu_and_mul", "element gate_up out n_tokens size")
        self._gelu_and_mul = declare(library, "gelu_and_mul", "element gate_up out n_tokens size")
        self._clamp = declare(
            library,
            "clamp_and_mul",
            "element gate_up out n_tokens size slope limit",
        )
        self._gelu = declare(library, "gelu", "element x out n_tokens size")
        self._gelu_tanh = declare(library, "gelu_tanh", "element x out n_tokens size")
        self._sigmoid = declare(
            library,
            "sigmoid_and_mul",
            "element gate stride gate_size x out n_tokens size",
        )

    def gelu(self, x: Tensor) -> Tensor:
        return _activated(self._gelu, x) if x.dtype in ELEMENT else gelu(x)

    def gelu_tanh(self, x: Tensor) -> Tensor:
        return _activated(self._gelu_tanh, x) if x.dtype in ELEMENT else gelu_tanh(x)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        if gate_up.dtype not in ELEMENT:
            return silu_and_mul(gate_up)
        return _gated(self._silu, gate_up)

    def gelu_and_mul(self, gate_up: Tensor) -> Tensor:
        if gate_up.dtype not in ELEMENT:
            return gelu_and_mul(gate_up)
        return _gated(self._gelu_and_mul, gate_up)

    def clamp_and_mul(self, gate_up: Tensor, clamp: Clamp) -> Tensor:
        if gate_up.dtype not in ELEMENT:
            return clamp_and_mul(gate_up, clamp)
        return _gated(self._clamp, gate_up, clamp.slope, clamp.limit)

    def sigmoid_and_mul(self, gate: Tensor, x: Tensor) -> Tensor:
        if x.dtype not in ELEMENT or gate.dtype != x.dtype or gate.stride(1) != 1:
            return sigmoid_and_mul(gate, x)
        x = x.contiguous()
        out = torch.empty_like(x)
        self._sigmoid(
            ELEMENT[x.dtype],
            gate.data_ptr(),
            gate.stride(0),
            gate.shape[1],
            x.data_ptr(),
            out.data_ptr(),
            *x.shape,
        )
        return out


def _activated(function: Callable[..., None], x: Tensor) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    function(ELEMENT[x.dtype], x.data_ptr(), out.data_ptr(), *x.shape)
    return out


def _gated(function: Callable[..., None], gate_up: Tensor, *numbers: float) -> Tensor:
    gate_up = gate_up.contiguous()
    n_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((n_tokens, size), dtype=gate_up.dtype)
    element = ELEMENT[gate_up.dtype]
    function(element, gate_up.data_ptr(), out.data_ptr(), n_tokens, size, *numbers)
    return out
