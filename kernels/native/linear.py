"""Linear layers on the CPU over weights that are packed for the native library.

A packed weight is [n_panels, n_steps, panel, inputs]: a panel has `panel` outputs, and a step has
the `inputs` elements of a 32-bit word, as `src/linear.cpp` describes. The last panel and the last
step are padded with zeros.

With int8 weights each output has a scale (`kernels.weights.quantise`). The library quantises inputs
during the product, with a scale for each token, and sums are exact (symmetric quantisation of
weights and activations). The library adds 128 to each quantised input, so that inputs are unsigned.
To correct for this, each sum starts with -128 times the sum of the output's weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.native.call import ELEMENT, GATES, NO_GATE, declare
from kernels.native.library import library
from kernels.weights.linear import Gate
from kernels.weights.quantise import LARGEST, quantised

_WORD_BYTES = 4
_MAX_INPUTS = (2**31 - 1) // LARGEST**2  # a sum of more products may not fit into 32 bits


@dataclass(frozen=True, slots=True)
class _LinearFunctions:
    """The native library's functions for weights of one element type."""

    linear: Callable[..., None]
    panel: int  # outputs of a panel


@cache
def _functions(dtype: torch.dtype) -> _LinearFunctions | None:
    """Returns the native library's functions for weights of `dtype`. Returns None if there is no
    library or if it does not support `dtype`."""
    loaded = library()
    if loaded is None or dtype not in ELEMENT:
        return None
    return _LinearFunctions(
        declare(
            loaded,
            "linear",
            "element x weights bias residual out n_tokens n_in n_out finish",
        ),
        declare(loaded, "linear_panel", "")(),
    )


def can_pack(weight: Tensor) -> bool:
    """Returns whether `NativeWeight` can pack the matrix `weight`."""
    is_here = weight.device.type == "cpu" and weight.numel() > 0
    return is_here and _functions(weight.dtype) is not None


def can_gate(weight: Tensor) -> bool:
    """Returns whether `NativeGatedWeight` can pack the matrix `weight` [2 * n_out, n_in]. The
    gate's rows come first in the matrix."""
    if not can_pack(weight):
        return False
    functions = _functions(weight.dtype)
    return functions is not None and weight.shape[0] % functions.panel == 0


@dataclass(frozen=True, slots=True)
class NativeWeight:
    """A matrix in panels; implements `kernels.weights.linear.LinearWeight`."""

    packed: Tensor  # [n_panels, n_steps, panel, inputs]
    shape: tuple[int, int]
    functions: _LinearFunctions

    @classmethod
    def of(cls, weight: Tensor) -> NativeWeight:
        """Packs a matrix. `can_pack` must be true for the matrix."""
        functions = _functions(weight.dtype)
        if functions is None:
            raise ValueError(f"the native library does not compute with {weight.dtype}")
        n_out, n_in = weight.shape
        return cls(_in_panels(weight, functions.panel), (n_out, n_in), functions)

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def __call__(
        self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        n_out = self.shape[0]
        out = x.new_empty(x.shape[0], n_out)
        _linear(self.functions, x, (self.packed,), bias, residual, out, n_out=n_out, gate=NO_GATE)
        return out  # [n_tokens, n_out]

    def rows(self, indices: Tensor) -> Tensor:
        """Returns the rows of the matrix at `indices` [n] in their original order of elements: [n,
        n_in]."""
        panel = self.functions.panel
        rows = self.packed[indices // panel, :, indices % panel]  # [n, n_steps, inputs]
        return rows.flatten(1)[:, : self.shape[1]]


@dataclass(frozen=True, slots=True)
class NativeGatedWeight:
    """The gate and up matrices of a gated MLP in panels, with a fused gate function.

    The first half of the outputs of a panel belongs to the gate matrix, the second half to the up
    matrix.
    """

    packed: Tensor  # [n_panels, n_steps, panel, inputs]
    shape: tuple[int, int]  # 2 * n_out, n_in
    functions: _LinearFunctions
    gate: int

    @classmethod
    def of(cls, weight: Tensor, gate: Gate) -> NativeGatedWeight:
        """Packs a matrix. `can_gate` must be true for the matrix."""
        functions = _functions(weight.dtype)
        if functions is None:
            raise ValueError(f"the native library does not compute with {weight.dtype}")
        n_out, n_in = weight.shape
        packed = _in_panels(_gates_beside(weight, functions.panel), functions.panel)
        return cls(packed, (n_out, n_in), functions, GATES[gate])

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        n_out = self.shape[0]
        out = x.new_empty(x.shape[0], n_out // 2)
        _linear(self.functions, x, (self.packed,), None, None, out, n_out=n_out, gate=self.gate)
        return out  # [n_tokens, n_out of each]


def has_int8() -> bool:
    """Returns whether the library is available and multiplies int8 weights with int8
    instructions."""
    return _int8_functions() is not None


@cache
def _int8_functions() -> _LinearFunctions | None:
    loaded = library()
    if loaded is None:
        return None
    if not declare(loaded, "linear_has_int8", "")():
        return None
    return _LinearFunctions(
        declare(
            loaded,
            "linear_int8",
            "element x weights starts scales bias residual out n_tokens n_in n_out finish",
        ),
        declare(loaded, "linear_panel", "")(),
    )


def can_quantise(weight: Tensor) -> bool:
    """Returns whether `NativeInt8Weight` can quantise and pack the matrix `weight`."""
    is_here = weight.device.type == "cpu" and weight.numel() > 0
    return is_here and weight.dtype in ELEMENT and weight.shape[1] <= _MAX_INPUTS and has_int8()


def can_quantise_gated(weight: Tensor) -> bool:
    """Returns whether `NativeInt8GatedWeight` can quantise and pack the matrix `weight` [2 * n_out,
    n_in]. The gate's rows come first in the matrix."""
    functions = _int8_functions()
    return can_quantise(weight) and functions is not None and weight.shape[0] % functions.panel == 0


@dataclass(frozen=True, slots=True)
class _Int8Panels:
    """Quantised weights in the layout of the library; the last panel is padded with zeros."""

    packed: Tensor  # [n_panels, n_steps, panel, inputs], int8
    starts: Tensor  # [n_panels * panel], int32, the number that the sum of each output starts with
    scales: Tensor  # [n_panels * panel], float32

    @classmethod
    def of(cls, weight: Tensor, panel: int) -> _Int8Panels:
        whole, scales = quantised(weight)
        starts = whole.sum(1, dtype=torch.int32).mul_(-128)
        missing = (0, -len(scales) % panel)
        return cls(_in_panels(whole, panel), F.pad(starts, missing), F.pad(scales, missing))

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.starts.nbytes + self.scales.nbytes


@dataclass(frozen=True, slots=True)
class NativeInt8Weight:
    """A matrix in panels of int8; implements `kernels.weights.linear.LinearWeight`.

    Products take float32 or bfloat16, and a bias and a residual of the same type.
    """

    panels: _Int8Panels
    shape: tuple[int, int]
    functions: _LinearFunctions

    @classmethod
    def of(cls, weight: Tensor) -> NativeInt8Weight:
        """Quantises and packs a matrix. `can_quantise` must be true for the matrix."""
        functions = _needed_int8_functions()
        n_out, n_in = weight.shape
        return cls(_Int8Panels.of(weight, functions.panel), (n_out, n_in), functions)

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes

    def __call__(
        self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        n_out = self.shape[0]
        out = x.new_empty(x.shape[0], n_out)
        weights = (self.panels.packed, self.panels.starts, self.panels.scales)
        _linear(self.functions, x, weights, bias, residual, out, n_out=n_out, gate=NO_GATE)
        return out  # [n_tokens, n_out]


@dataclass(frozen=True, slots=True)
class NativeInt8GatedWeight:
    """The gate and up matrices of a gated MLP in panels of int8, with a fused gate function.

    The first half of the outputs of a panel belongs to the gate matrix, the second half to the up
    matrix.
    """

    panels: _Int8Panels
    shape: tuple[int, int]  # 2 * n_out, n_in
    functions: _LinearFunctions
    gate: int

    @classmethod
    def of(cls, weight: Tensor, gate: Gate) -> NativeInt8GatedWeight:
        """Quantises and packs a matrix. `can_quantise_gated` must be true for the matrix."""
        functions = _needed_int8_functions()
        n_out, n_in = weight.shape
        panels = _Int8Panels.of(_gates_beside(weight, functions.panel), functions.panel)
        return cls(panels, (n_out, n_in), functions, GATES[gate])

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        n_out = self.shape[0]
        out = x.new_empty(x.shape[0], n_out // 2)
        weights = (self.panels.packed, self.panels.starts, self.panels.scales)
        _linear(self.functions, x, weights, None, None, out, n_out=n_out, gate=self.gate)
        return out  # [n_tokens, n_out of each]


def _needed_int8_functions() -> _LinearFunctions:
    functions = _int8_functions()
    if functions is None:
        raise ValueError("the native library does not compute with int8")
    return functions


def _gates_beside(weight: Tensor, panel: int) -> Tensor:
    """Reorders the rows of `weight` [2 * n_out, n_in] for gated panels, which are blocks of
    adjacent rows. Each panel of the result has rows of the gate first, then an equal number of rows
    of the up matrix."""
    halves = weight.view(2, -1, panel // 2, weight.shape[1])
    return halves.transpose(0, 1).reshape(weight.shape)


def _in_panels(weight: Tensor, panel: int) -> Tensor:
    n_out, n_in = weight.shape
    inputs = _WORD_BYTES // weight.element_size()
    n_panels, n_steps = -(-n_out // panel), -(-n_in // inputs)
    whole = F.pad(weight, (0, n_steps * inputs - n_in, 0, n_panels * panel - n_out))
    return whole.view(n_panels, panel, n_steps, inputs).transpose(1, 2).contiguous()


def _linear(
    functions: _LinearFunctions,
    x: Tensor,
    weights: tuple[Tensor, ...],  # the packed weights, and for int8 also starts and scales
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    *,
    n_out: int,
    gate: int,
) -> None:
    _, n_steps, _, inputs = weights[0].shape
    if -(-x.shape[1] // inputs) != n_steps:
        raise ValueError(f"inputs {list(x.shape)} for a weight of {n_steps * inputs} inputs")
    for other in (bias, residual, weights[0]):
        if other is not None and other.dtype not in (x.dtype, torch.int8):
            raise ValueError(f"{x.dtype} and {other.dtype} in one product")
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    functions.linear(
        ELEMENT[x.dtype],
        x.data_ptr(),
        *(part.data_ptr() for part in weights),
        None if bias is None else bias.data_ptr(),
        None if residual is None else residual.data_ptr(),
        out.data_ptr(),
        *x.shape,
        n_out,
        gate,
    )
