"""The argmax of every row of logits, on the CPU."""

import ctypes

import torch
from torch import Tensor

from kernels.native.call import ELEMENT, declare
from kernels.pytorch.greedy import greedy


class NativeGreedy:
    """The operation `Ops.greedy` on the CPU: the argmax of every row of logits."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._greedy = declare(library, "greedy", "element logits stride n_rows size tokens")

    def greedy(self, logits: Tensor) -> Tensor:
        if logits.dtype not in ELEMENT or logits.stride(1) != 1:
            return greedy(logits)
        n_rows, size = logits.shape
        tokens = torch.empty(n_rows, dtype=torch.int64)
        element, stride = ELEMENT[logits.dtype], logits.stride(0)
        self._greedy(element, logits.data_ptr(), stride, n_rows, size, tokens.data_ptr())
        return tokens
