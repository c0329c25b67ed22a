"""A rank's share of a stage's tensors, read from a checkpoint's files.

Names and shapes are checked before anything is read. What is quantised in the files is dequantised
on the way, a block at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.packed_linear import Quantization
from services.worker.models.quantised.find import find_stored
from services.worker.models.stored_tensor import StoredTensor
from services.worker.models.tensor_files import CheckpointError, TensorFiles, enumerate_problems
from services.worker.models.weight_format import WeightFormat
from services.worker.models.weights import OnProgress, Part, Progress, TensorSource, WantedTensors


class CheckpointTensors(TensorSource):
    """The wanted tensors of a checkpoint, in the element type and place wanted."""

    def __init__(
        self,
        files: TensorFiles,
        wanted: WantedTensors,
        *,
        dtype: torch.dtype,
        device: torch.device,
        on_progress: OnProgress,
        quantization: Quantization = "none",
        weight_format: WeightFormat | None = None,
    ) -> None:
        """Checks names and shapes in the files; raises CheckpointError for those not as wanted."""
        super().__init__(wanted.tp_rank, wanted.tp_size, quantization)
        self._dtype = dtype
        self._device = device
        self._stored = _stored_tensors(wanted, files, weight_format)
        n_bytes = self._check(wanted)
        files.close()
        self._progress = Progress(n_bytes, on_progress)

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self._dtype, device=self._device)

    def _read(self, part: Part, out: Tensor) -> None:
        stored = self._stored[part.name]
        whole = part.spans
        for spans in stored.pieces(whole):
            place = tuple(
                slice(span.start - all_.start, span.stop - all_.start)
                for span, all_ in zip(spans, whole, strict=True)
            )
            out[place].copy_(stored.read(spans))
            self._progress.add(stored.n_bytes(spans))

    def _check(self, wanted: WantedTensors) -> int:
        """Returns the bytes in the files of all that is wanted; raises CheckpointError."""
        problems = [
            problem
            for part in wanted.parts
            for problem in self._stored[part.name].problems(part.shape)
        ]
        if problems:
            raise CheckpointError(enumerate_problems(list(dict.fromkeys(problems))))
        return sum(
            self._stored[part.name].n_bytes(spans)
            for part in wanted.parts
            for spans in self._stored[part.name].pieces(part.spans)
        )


def _stored_tensors(
    wanted: WantedTensors, files: TensorFiles, weight_format: WeightFormat | None
) -> dict[str, StoredTensor]:
    """Returns how each wanted tensor is stored; raises CheckpointError for those that are not."""
    stored: dict[str, StoredTensor] = {}
    missing = []
    for part in {part.name: part for part in wanted.parts}.values():
        found = find_stored(part, files, weight_format)
        if found is None:
            missing.append(part.name)
        else:
            stored[part.name] = found
    if missing:
        raise CheckpointError(f"{files} lacks {enumerate_problems(missing)}")
    return stored
