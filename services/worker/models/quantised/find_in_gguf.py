"""Finds how a GGUF file stores a tensor: plain, or quantised in one of GGUF's types."""

from __future__ import annotations

from services.worker.models.gguf_file import GgufFile
from services.worker.models.quantised.gguf_matrix import GgufMatrix
from services.worker.models.quantised.gguf_stack import GgufStack
from services.worker.models.stored_tensor import PlainTensor, StoredTensor
from services.worker.models.tensor_files import TensorFiles
from services.worker.models.weights import Part


def find_in_gguf(part: Part, files: TensorFiles) -> StoredTensor | None:
    """Returns the stored tensor that contains `part`, or None if the file lacks the tensor. In
    GGUF, each tensor has its own quantisation type. `files` must be a `GgufFile`."""
    assert isinstance(files, GgufFile)
    name = files.find(part.name)
    if name is None:
        return None
    if part.is_mxfp4:
        return GgufStack(files, name)
    is_matrix = len(part.shape) == 2 and not part.is_transposed
    if is_matrix and files.is_in_blocks(name):
        return GgufMatrix(files, name)
    return PlainTensor(files, name)
