"""Makes Triton's interpreter compute bfloat16 as devices do, and start programs fast.

It keeps bfloat16 as bit patterns of 16 bits. Turned into them, a float32 is cut off where a device
rounds it, and a product takes the patterns for whole numbers. Operations on single elements other
than a change of type stay wrong; kernels compute those in float32.

It patches Triton's language for each launch and for each call of a function, which takes longer
than most of our programs. Where nothing is compiled, once is enough.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def correct_bfloat16() -> None:
    """For the whole process; once."""
    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        types = src.dtype.scalar, dst_type.scalar
        if types == (tl.float32, tl.bfloat16):
            wide = torch.from_numpy(np.ascontiguousarray(src.data))
            bits = wide.bfloat16().view(torch.uint16).numpy()
            return TensorHandle(bits.reshape(np.shape(src.data)), tl.bfloat16)
        if types == (tl.bfloat16, tl.float32):
            return _widened(src)
        if types == (tl.int8, tl.bfloat16):
            return cast_impl(self, cast(self, src, tl.float32), tl.bfloat16)
        return cast(self, src, dst_type)

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        operands = [_widened(x) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)]
        return dot(self, *operands, *others)

    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_dot = create_dot


def patch_language() -> None:
    """For the whole process; once."""
    nothing = type(
        interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    )
    interpreter._patch_lang = lambda function: nothing()


def _widened(x: Any) -> Any:
    bits = np.ascontiguousarray(x.data).astype(np.uint32) << 16
    return TensorHandle(bits.view(np.float32).reshape(np.shape(x.data)), tl.float32)
