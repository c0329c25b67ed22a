"""Root-mean-square normalisation and layer normalisation on the CPU."""

import ctypes

import torch
from torch import Tensor

from kernels.native.call import ELEMENT, declare, dense_rows
from kernels.pytorch.norms import layer_norm, rms_norm


class NativeNorms:
    """The operations `Ops.rms_norm` and `Ops.layer_norm` on the CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._rms_norm = declare(
            library,
            "rms_norm",
            "element x weight_element weight out n_outer outer_stride n_inner size eps",
        )
        self._layer_norm = declare(
            library,
            "layer_norm",
            "element x weight_element weight bias out n_outer outer_stride n_inner size eps",
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        element, weight_element = ELEMENT.get(x.dtype), ELEMENT.get(weight.dtype)
        if element is None or weight_element is None or not weight.is_contiguous():
            return rms_norm(x, weight, eps)
        x, n_outer, outer_stride, n_inner = dense_rows(x)
        out = torch.empty(x.shape, dtype=x.dtype)
        self._rms_norm(
            element,
            x.data_ptr(),
            weight_element,
            weight.data_ptr(),
            out.data_ptr(),
            n_outer,
            outer_stride,
            n_inner,
            x.shape[-1],
            eps,
        )
        return out

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        element, weight_element = ELEMENT.get(x.dtype), ELEMENT.get(weight.dtype)
        is_dense = weight.is_contiguous() and bias.is_contiguous()
        if element is None or weight_element is None or bias.dtype != weight.dtype or not is_dense:
            return layer_norm(x, weight, bias, eps)
        x, n_outer, outer_stride, n_inner = dense_rows(x)
        out = torch.empty(x.shape, dtype=x.dtype)
        self._layer_norm(
            element,
            x.data_ptr(),
            weight_element,
            weight.data_ptr(),
            bias.data_ptr(),
            out.data_ptr(),
            n_outer,
            outer_stride,
            n_inner,
            x.shape[-1],
            eps,
        )
        return out
