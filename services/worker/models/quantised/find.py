"""Finds how a checkpoint stores a tensor: plain, or quantised in one of the layouts."""

from __future__ import annotations

from collections.abc import Iterator

from services.worker.models.quantised.bitsandbytes import MARK, BlockwiseMatrix, RowsMatrix
from services.worker.models.quantised.fp4 import Fp4Matrix, PackedFp4Matrix, PowersFp4Matrix
from services.worker.models.quantised.inputs_first import AwqMatrix, GptqMatrix
from services.worker.models.quantised.matrix import QuantisedMatrix
from services.worker.models.quantised.mlx import MlxMatrix, MlxMxfp4Matrix, MlxNvfp4Matrix
from services.worker.models.quantised.mxfp4 import Mxfp4Tensor
from services.worker.models.quantised.packed import PackedMatrix
from services.worker.models.quantised.scaled import ScaledMatrix
from services.worker.models.stacked_experts import find_expert, find_mlx_expert
from services.worker.models.stored_tensor import PlainTensor, StoredTensor
from services.worker.models.tensor_files import CheckpointError, TensorFiles
from services.worker.models.weight_format import Layout, WeightFormat
from services.worker.models.weights import Part

_QUANTISED = frozenset(("I8", "F8_E4M3", "U8", "U32"))
"""Element types of the tensor `weight` that show that the matrix is quantised."""

_NUMBERS: dict[Layout, str] = {
    "gptq": "qweight",
    "awq": "qweight",
    "packed": "weight_packed",
    "nvfp4_packed": "weight_packed",
    "mxfp4_packed": "weight_packed",
}  # names of the tensors with the numbers, instead of `weight`

_LAYOUTS: dict[Layout, type[QuantisedMatrix]] = {
    "gptq": GptqMatrix,
    "awq": AwqMatrix,
    "packed": PackedMatrix,
    "scaled": ScaledMatrix,
    "int8_rows": RowsMatrix,
    "blockwise": BlockwiseMatrix,
    "nvfp4": Fp4Matrix,
    "nvfp4_packed": PackedFp4Matrix,
    "mxfp4_packed": PowersFp4Matrix,
    "mlx": MlxMatrix,
    "mlx_nvfp4": MlxNvfp4Matrix,
    "mlx_mxfp4": MlxMxfp4Matrix,
}


def find_stored(
    part: Part, files: TensorFiles, weight_format: WeightFormat | None
) -> StoredTensor | None:
    """Returns the stored tensor that contains `part`, or None if the files lack the tensor.

    The files determine whether the tensor is quantised, and `weight_format` determines the layout.
    The layout of `mxfp4.py` is used only if the family requests it (`Part.is_mxfp4`).
    """
    if files.is_gguf:
        # The package `gguf` takes up to a second to import, which other checkpoints do not need.
        from services.worker.models.quantised.find_in_gguf import find_in_gguf

        return find_in_gguf(part, files)
    if part.is_mxfp4:
        return Mxfp4Tensor(files, part.name)
    name = files.find(part.name)
    if name is None and (expert := find_mlx_expert(files, part.name)) is not None:
        files, name = expert
    module = part.name.removesuffix(".weight")
    if weight_format is None or module == part.name:
        return find_expert(files, part.name) if name is None else PlainTensor(files, name)
    if name is None:
        for numbers in sorted(set(_NUMBERS.values())):
            name = files.find(f"{module}.{numbers}")
            if name is not None:
                return _matrix(files, part, name, weight_format)
        return find_expert(files, part.name)
    if files.header(name).element in _QUANTISED or files.find(f"{name}{MARK}") is not None:
        return _matrix(files, part, name, weight_format)
    return _FloatsOfQuantised(files, name)


def _matrix(files: TensorFiles, part: Part, name: str, weight_format: WeightFormat) -> StoredTensor:
    """Returns the quantised matrix whose numbers are in the tensor `name`. Raises CheckpointError
    if that contradicts the settings in `weight_format`, or if the tensor is no matrix of a linear
    layer."""
    module, _, numbers = name.rpartition(".")
    form = weight_format.of(part.name.removesuffix(".weight")) and weight_format.of(module)
    if form is None:
        raise CheckpointError(
            f"{files}: {name} is quantised, and quantization_config says that {module} is not"
        )
    if numbers != _NUMBERS.get(form.layout, "weight"):
        raise CheckpointError(
            f"{files}: {name} is not how quantization_config says that it is stored"
        )
    if part.is_transposed or len(part.shape) != 2:
        raise CheckpointError(f"{files}: {name}: only matrices of linear layers may be quantised")
    return _LAYOUTS[form.layout](files, module, part.shape, form)


class _FloatsOfQuantised(PlainTensor):
    """A matrix that is stored as floats in a checkpoint whose other matrices are quantised. It must
    have no scales."""

    def problems(self, shape: tuple[int, ...]) -> Iterator[str]:
        module = self._name.removesuffix(".weight")
        for suffix in ("weight_scale", "weight_scale_inv"):
            if self._files.find(f"{module}.{suffix}") is not None:
                yield f"{self._name} has element type {self._header.element} beside its {suffix}"
        yield from super().problems(shape)
