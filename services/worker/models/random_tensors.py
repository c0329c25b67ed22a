"""Random values for a rank's share of a stage's tensors, so that models run without a
checkpoint."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from kernels.weights.linear import Activations, Quantization
from services.worker.models.weights import (
    OnProgress,
    Part,
    Progress,
    TensorSource,
    WantedTensors,
    pieces,
)

_STD = 0.02  # the usual `initializer_range`
_TABLE_SIZE = 1 << 20


class RandomTensors(TensorSource):
    """A source of random tensors with the names and shapes that a model asks for.

    The values do not depend on the number of ranks. Matrices are normally distributed with a small
    deviation, norms are ones and biases are zeros. A row of a matrix is a slice of one table of
    random numbers. The tensor's name is the seed that chooses where each slice starts. So a rank
    fills its own part without computing the rest, as fast as it copies memory.
    """

    def __init__(
        self,
        wanted: WantedTensors,
        *,
        dtype: torch.dtype,
        device: torch.device,
        on_progress: OnProgress,
        quantization: Quantization = "none",
        activations: Activations = "rounded",
    ) -> None:
        super().__init__(wanted.tp_rank, wanted.tp_size, quantization, activations)
        self._dtype = dtype
        self._device = device
        longest = max((part.shape[-1] for part in wanted.parts), default=0)
        generator = torch.Generator().manual_seed(0)
        table = torch.randn(_TABLE_SIZE, generator=generator) * _STD
        table = table.repeat(1 + -(-longest // _TABLE_SIZE))
        self._table = table.to(device=device, dtype=dtype)
        n_elements = sum(part.n_elements for part in wanted.parts)
        self._progress = Progress(n_elements * dtype.itemsize, on_progress)

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self._dtype, device=self._device)

    def _read(self, part: Part, out: Tensor) -> None:
        if len(part.shape) == 1:
            out.fill_(0 if part.name.endswith("bias") else 1)
            self._progress.add(part.n_elements * self._dtype.itemsize)
            return
        seed = int.from_bytes(hashlib.sha256(part.name.encode()).digest()[:8]) >> 1
        starts = torch.randint(
            _TABLE_SIZE, part.shape[:-1], generator=torch.Generator().manual_seed(seed)
        )
        *row_spans, columns = part.spans
        starts = starts[tuple(slice(span.start, span.stop) for span in row_spans)]
        rows = starts.flatten().to(self._device) + columns.start
        stretches = self._table.unfold(0, max(len(columns), 1), 1)
        flat = out.view(len(rows), -1) if out.dim() > 2 else out  # [n_rows, n_columns]
        for begin, end in pieces(len(rows), len(columns) * self._dtype.itemsize):
            flat[begin:end].copy_(stretches.index_select(0, rows[begin:end]))
            self._progress.add((end - begin) * len(columns) * self._dtype.itemsize)
