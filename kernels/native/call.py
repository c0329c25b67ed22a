"""Passes arguments to the native library.

Tensors are passed as addresses, sizes and strides, which the library does not check. So each
operation first checks whether the library supports the tensors, and calls PyTorch's operation
otherwise.
"""

import ctypes
from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

# The element types that the library computes with, by their numbers in `element.h`.
ELEMENT: Mapping[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1}

NO_GATE = 0
GATES: Mapping[str, int] = {"silu": 1, "gelu_tanh": 2}
"""For each gate function that can be fused with a product, its number in `operations.h`."""

NO_MEMORY = -1
"""The status that an operation returns if it could not allocate memory, as in `memory.h`."""

_PARAMETERS = {"int64_t": ctypes.c_int64, "float": ctypes.c_float}
_RESULTS = {"void": None, "int64_t": ctypes.c_int64, "orcinus::Status": ctypes.c_int64}


def declare(library: ctypes.CDLL, name: str, parameters: str) -> Callable[..., Any]:
    """Returns the function `orcinus_<name>` of the native library, which takes positional
    arguments.

    `parameters` are the expected names of the function's parameters, in order, separated by spaces.
    The types are taken from the library's declaration. If the function returns a status in C++, the
    returned function raises MemoryError when memory could not be allocated.

    Raises:
        TypeError: the library declares parameters of other names.
    """
    declaration: Any = library[f"orcinus_{name}_declaration"]
    declaration.argtypes, declaration.restype = (), ctypes.c_char_p
    result, _, taken = declaration().decode().removesuffix(")").partition("(")
    kinds, names = _parsed(taken)
    for place, (theirs, ours) in enumerate(zip_longest(names, parameters.split())):
        if theirs != ours:
            raise TypeError(
                f"parameter {place} of orcinus_{name} is {theirs} in the library, {ours} in Python"
            )
    function: Any = library[f"orcinus_{name}"]
    function.argtypes, function.restype = kinds, _RESULTS[result]
    if result == "orcinus::Status":
        function.errcheck = _raise_no_memory
    return function  # type: ignore[no-any-return]


def _parsed(parameters: str) -> tuple[list[Any], list[str]]:
    """Parses a list of parameters in C++. Returns their ctypes types and their names."""
    pairs = [each.rsplit(" ", 1) for each in parameters.split(", ") if each]
    kinds = [ctypes.c_void_p if kind[-1] == "*" else _PARAMETERS[kind] for kind, _ in pairs]
    return kinds, [name for _, name in pairs]


def _raise_no_memory(status: int, function: Any, arguments: Any) -> None:
    if status == NO_MEMORY:
        raise MemoryError("the native kernels could not allocate memory")


def dense_heads(x: Tensor) -> Tensor:
    """Returns `x` [n_tokens, n_heads, head_dim] with adjacent heads in memory. If there are gaps
    between heads, the result is a copy."""
    n_heads_apart, elements_apart = x.stride()[1:]
    if elements_apart == 1 and n_heads_apart == x.shape[2]:
        return x
    return x.contiguous()


def dense_rows(x: Tensor) -> tuple[Tensor, int, int, int]:
    """Returns `x` [..., size], n_outer, outer_stride and n_inner, which describe where rows are in
    memory.

    There are n_outer runs of n_inner adjacent rows. The runs begin outer_stride elements apart. If
    the rows of `x` have another layout, the returned tensor is a dense copy.
    """
    size = x.shape[-1]
    if not x.is_contiguous():
        if x.dim() == 2 and x.stride(1) == 1:
            return x, x.shape[0], x.stride(0), 1
        if x.dim() == 3 and x.stride(2) == 1 and x.stride(1) == size:
            return x, x.shape[0], x.stride(0), x.shape[1]
        x = x.contiguous()
    return x, x.numel() // size, size, 1
