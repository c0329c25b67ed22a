"""How arguments are passed to the native library.

Tensors are passed as addresses, sizes and strides, and nothing checks them on the other side. So
each operation checks that they are what the library takes, and leaves others to PyTorch's version.
"""

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

# The element types that the library computes with, by their numbers in `element.h`.
ELEMENT: Mapping[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1}

_KINDS = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}


NO_MEMORY = -1
"""The status of an operation that could not allocate memory, as in `memory.h`."""


def declare(
    library: ctypes.CDLL, name: str, arguments: str, *, allocates: bool = False
) -> Callable[..., None]:
    """Returns `orcinus_<name>`; `arguments` has a letter for each: pointer, int64, float.

    One that `allocates` returns a status in C++, and raises MemoryError here.
    """
    function: Any = library[f"orcinus_{name}"]
    function.argtypes = [_KINDS[letter] for letter in arguments]
    function.restype = ctypes.c_int64 if allocates else None
    if allocates:
        function.errcheck = _raise_no_memory
    return function  # type: ignore[no-any-return]


def out_of_memory() -> MemoryError:
    """Returns the error of an operation whose status is NO_MEMORY."""
    return MemoryError("the native kernels could not allocate memory")


def _raise_no_memory(status: int, function: Any, arguments: Any) -> None:
    if status == NO_MEMORY:
        raise out_of_memory()


def dense_heads(x: Tensor) -> Tensor:
    """Returns `x` [n_tokens, n_heads, head_dim], copied if a token's heads are not dense."""
    n_heads_apart, elements_apart = x.stride()[1:]
    if elements_apart == 1 and n_heads_apart == x.shape[2]:
        return x
    return x.contiguous()


def dense_rows(x: Tensor) -> tuple[Tensor, int, int, int]:
    """Returns `x` [..., size] as rows in memory, n_outer, elements between outers, and n_inner.

    The rows of an outer lie one after the other. Where they do not, the result is a copy.
    """
    size = x.shape[-1]
    if not x.is_contiguous():
        if x.dim() == 2 and x.stride(1) == 1:
            return x, x.shape[0], x.stride(0), 1
        if x.dim() == 3 and x.stride(2) == 1 and x.stride(1) == size:
            return x, x.shape[0], x.stride(0), x.shape[1]
        x = x.contiguous()
    return x, x.numel() // size, size, 1
