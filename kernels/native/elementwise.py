"""Scaled sums and soft caps on the CPU."""

import ctypes

import torch
from torch import Tensor

from kernels.native.call import ELEMENT, declare
from kernels.pytorch.elementwise import add_scaled, soft_cap


class NativeElementwise:
    """The operations `Ops.add_scaled` and `Ops.soft_cap` on the CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._add_scaled = declare(library, "add_scaled", "element x y n_tokens size factor")
        self._soft_cap = declare(library, "soft_cap", "element x out n_tokens size cap")

    def add_scaled(self, x: Tensor, y: Tensor, factor: float) -> Tensor:
        if x.dtype not in ELEMENT or y.dtype != x.dtype:
            return add_scaled(x, y, factor)
        x, y = x.contiguous(), y.contiguous()
        self._add_scaled(ELEMENT[x.dtype], x.data_ptr(), y.data_ptr(), *x.shape, factor)
        return x

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        if x.dtype not in ELEMENT:
            return soft_cap(x, cap)
        x = x.contiguous()
        out = torch.empty(x.shape)
        self._soft_cap(ELEMENT[x.dtype], x.data_ptr(), out.data_ptr(), *x.shape, cap)
        return out
