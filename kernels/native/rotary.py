"""Rotary position embedding and the storing of keys and values on the CPU."""

import ctypes

import torch
from torch import Tensor

from kernels.forms.head_norms import HeadNorms
from kernels.native.call import ELEMENT, declare, dense_heads
from kernels.pytorch.rotary import rotary, rotary_write_kv, write_kv

# The arguments for no norms: element type, weights of queries and of keys, and epsilon.
_NO_NORMS = (0, None, None, 0.0)


class NativeRotary:
    """Rotation, and storing of keys and values, on the CPU: `Ops.rotary`, `Ops.write_kv` and
    `Ops.rotary_write_kv`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._rotary = declare(
            library,
            "rotary",
            "element x token_stride head_stride cos sin out out_token_stride out_head_stride "
            "n_tokens n_heads head_dim",
        )
        self._rotary_write_kv = declare(
            library,
            "rotary_write_kv",
            "element qkv cos sin keys values slots n_tokens n_heads n_kv_heads head_dim "
            "weight_element q_weight k_weight eps",
        )
        self._write_kv = declare(
            library,
            "write_kv",
            "k k_stride v v_stride keys values slots n_tokens size",
        )

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if x.dtype not in ELEMENT or not _are_angles_of(x, cos, sin):
            return rotary(x, cos, sin)
        x = x if x.stride(2) == 1 else x.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        self._rotary(
            ELEMENT[x.dtype],
            x.data_ptr(),
            *x.stride()[:2],
            cos.data_ptr(),
            sin.data_ptr(),
            out.data_ptr(),
            *out.stride()[:2],
            *x.shape,
        )
        return out

    def rotary_write_kv(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slots: Tensor,
        n_heads: int,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        is_taken = qkv.dtype in ELEMENT and qkv.is_contiguous() and _are_angles_of(qkv, cos, sin)
        if not is_taken or key_cache.dtype != qkv.dtype or not _are_taken(norms):
            return rotary_write_kv(qkv, cos, sin, key_cache, value_cache, slots, n_heads, norms)
        n_kv_heads, head_dim = key_cache.shape[2:]
        n_tokens = qkv.shape[0]
        self._rotary_write_kv(
            ELEMENT[qkv.dtype],
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            slots.data_ptr(),
            n_tokens,
            n_heads,
            n_kv_heads,
            head_dim,
            *_NO_NORMS if norms is None else _arguments(norms),
        )
        return qkv.view(n_tokens, -1, head_dim)[:, :n_heads]

    def write_kv(
        self, k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
    ) -> None:
        if not k.dtype == v.dtype == key_cache.dtype == value_cache.dtype:
            write_kv(k, v, key_cache, value_cache, slots)
            return
        k, v = dense_heads(k), dense_heads(v)
        n_bytes = k.element_size()
        self._write_kv(
            k.data_ptr(),
            k.stride(0) * n_bytes,
            v.data_ptr(),
            v.stride(0) * n_bytes,
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            slots.data_ptr(),
            k.shape[0],
            k.shape[1] * k.shape[2] * n_bytes,
        )


def _are_angles_of(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Returns whether the library can rotate `x` by the angles `cos` and `sin`. The angles must be
    dense and have the element type of `x`."""
    is_dense = cos.is_contiguous() and sin.is_contiguous()
    return is_dense and cos.dtype == sin.dtype == x.dtype


def _are_taken(norms: HeadNorms | None) -> bool:
    """Returns whether the library can compute with `norms`. They must be None, or have weights of
    one type that the library supports."""
    return norms is None or (norms.q.dtype == norms.k.dtype and norms.q.dtype in ELEMENT)


def _arguments(norms: HeadNorms) -> tuple[int, int, int, float]:
    return ELEMENT[norms.q.dtype], norms.q.data_ptr(), norms.k.data_ptr(), norms.eps
