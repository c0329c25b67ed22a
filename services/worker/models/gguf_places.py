"""Checks the offsets of the tensors in a GGUF file.

The tensors of a file must follow each other in the order of the header, each at the next multiple
of the alignment. llama.cpp requires this as well. A file with other offsets has been damaged, and
the bytes of one tensor would be read as another tensor.

The package `gguf` takes up to a second to import. Every worker imports this module, also for
checkpoints of other formats. So functions import the package, when a GGUF file is read.
"""

from __future__ import annotations

from collections import Counter

from services.common.gguf.header import GgufHeader, TensorPlace
from services.worker.models.config import UnsupportedModel

_ALIGNMENT = 32
"""Alignment of tensors in bytes, for a file that states no alignment."""


def check_places(header: GgufHeader) -> None:
    """Raises UnsupportedModel if a tensor does not begin directly after the previous tensor of its
    file, at the next multiple of the alignment."""
    alignment = header.metadata.get("general.alignment", _ALIGNMENT)
    expected: int | None = None
    file = header.path
    for name, place in header.tensors.items():
        expected = expected if place.path == file else None
        file = place.path
        if expected is not None and place.offset != expected:
            raise UnsupportedModel(
                f"{file}: {name} is at byte {place.offset}, and not behind the tensor "
                f"before it, at {expected}"
            )
        n_bytes = _n_bytes(place)
        expected = n_bytes and -(-(place.offset + n_bytes) // alignment) * alignment


def types_in_words(header: GgufHeader) -> str:
    """Returns a text with the element types in a file and the number of tensors of each type, such
    as "Q4_K in 193 tensors, F32 in 61 tensors"."""
    types = Counter(place.type for place in header.tensors.values())
    return ", ".join(f"{_name_of(kind)} in {n} tensors" for kind, n in types.most_common())


def _name_of(kind: int) -> str:
    from gguf.constants import GGMLQuantizationType

    try:
        return GGMLQuantizationType(kind).name
    except ValueError:
        return f"type {kind}"


def _n_bytes(place: TensorPlace) -> int | None:
    """Returns the number of bytes of a tensor, or None if its type is unknown or it does not
    consist of whole blocks."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        n_per_block, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(place.type)]
    except (ValueError, KeyError):
        return None
    n_blocks, rest = divmod(place.n_elements, n_per_block)
    return None if rest else n_blocks * n_bytes
