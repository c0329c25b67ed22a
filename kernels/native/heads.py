"""Products of each head's vector with a matrix of that head, on the CPU.

Packed matrices are [n_heads, n_panels, n_steps, panel, inputs]: a panel has `panel` outputs, and a
step has the `inputs` elements of a 32-bit word, as `src/heads.cpp` describes. The last panel and
the last step are padded with zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch.nn.functional as F
from torch import Tensor

from kernels.native.call import ELEMENT, declare
from kernels.native.library import library

_WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class _HeadFunctions:
    """The library's function for products of heads, and the size of a panel."""

    heads: Callable[..., None]
    panel: int  # outputs of a panel


@cache
def _functions() -> _HeadFunctions | None:
    """Returns the library's function for products of heads. Returns None if there is no library."""
    loaded = library()
    if loaded is None:
        return None
    return _HeadFunctions(
        declare(
            loaded,
            "heads",
            "element x token_stride head_stride weights out out_token_stride out_head_stride "
            "n_tokens n_heads n_in n_out",
        ),
        declare(loaded, "heads_panel", "")(),
    )


def can_pack_heads(weight: Tensor) -> bool:
    """Returns whether `NativeHeads` can pack the matrices `weight` [n_heads, n_out, n_in]."""
    is_here = weight.device.type == "cpu" and weight.numel() > 0
    return is_here and weight.dtype in ELEMENT and _functions() is not None


@dataclass(frozen=True, slots=True)
class NativeHeads:
    """The matrices of heads, in panels; implements `kernels.weights.head_products.HeadProducts`."""

    packed: Tensor  # [n_heads, n_panels, n_steps, panel, inputs]
    shape: tuple[int, int, int]
    functions: _HeadFunctions

    @classmethod
    def of(cls, weight: Tensor) -> NativeHeads:
        """Packs matrices [n_heads, n_out, n_in]. `can_pack_heads` must be true for the matrices."""
        functions = _functions()
        if functions is None:
            raise ValueError("there is no native library that computes products of heads")
        n_heads, n_out, n_in = weight.shape
        panel, inputs = functions.panel, _WORD_BYTES // weight.element_size()
        whole = F.pad(weight, (0, -n_in % inputs, 0, -n_out % panel))
        panels = whole.view(n_heads, whole.shape[1] // panel, panel, -1, inputs)
        return cls(panels.transpose(2, 3).contiguous(), (n_heads, n_out, n_in), functions)

    def __call__(self, x: Tensor) -> Tensor:
        n_heads, n_out, n_in = self.shape
        if x.shape[1:] != (n_heads, n_in) or x.dtype != self.packed.dtype:
            raise ValueError(
                f"{list(x.shape)} of {x.dtype} for {self.shape} of {self.packed.dtype}"
            )
        if x.stride(2) != 1:
            x = x.contiguous()
        out = x.new_empty(len(x), n_heads, n_out)
        self.functions.heads(
            ELEMENT[x.dtype],
            x.data_ptr(),
            *x.stride()[:2],
            self.packed.data_ptr(),
            out.data_ptr(),
            *out.stride()[:2],
            len(x),
            n_heads,
            n_in,
            n_out,
        )
        return out  # [n_tokens, n_heads, n_out]
