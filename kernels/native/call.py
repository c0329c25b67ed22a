"""What calls of the native library have in common: how arguments go there.

Tensors go as addresses, sizes and strides; nothing checks them on the other side, so each operation
sees to it here that they are what the library takes, and leaves the rest to PyTorch's version.
"""

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

# The element types that the library computes with, by their numbers in `element.h`.
ELEMENT: Mapping[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1}

_KINDS = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}


def declare(library: ctypes.CDLL, name: str, arguments: str) -> Callable[..., None]:
    """The function `orcinus_<name>`; `arguments` has a letter for each: pointer, int64, float."""
    function: Any = library[f"orcinus_{name}"]
    function.argtypes = [_KINDS[letter] for letter in arguments]
    function.restype = None
    return function  # type: ignore[no-any-return]


def dense_heads(x: Tensor) -> Tensor:
    """`x` [n_tokens, n_heads, head_dim] with a token's heads one after the other in memory."""
    n_heads_apart, elements_apart = x.stride()[1:]
    if elements_apart == 1 and n_heads_apart == x.shape[2]:
        return x
    return x.contiguous()


def dense_rows(x: Tensor) -> tuple[Tensor, int, int, int]:
    """`x` [..., size] as rows in memory: itself, n_outer, elements between outers, n_inner.

    Rows of an outer lie one after the other. What does not lie like this is copied.
    """
    size = x.shape[-1]
    if not x.is_contiguous():
        if x.dim() == 2 and x.stride(1) == 1:
            return x, x.shape[0], x.stride(0), 1
        if x.dim() == 3 and x.stride(2) == 1 and x.stride(1) == size:
            return x, x.shape[0], x.stride(0), x.shape[1]
        x = x.contiguous()
    return x, x.numel() // size, size, 1
